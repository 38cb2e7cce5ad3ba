# Both programs: the router (`modelpool`, the entry point) and `modelpool-operator`.
ARG PYTHON=3.13
FROM docker.io/library/python:${PYTHON}-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY router ./router
COPY operator ./operator
RUN python -m venv /opt/modelpool \
 && /opt/modelpool/bin/pip install --no-cache-dir --constraint constraints.txt ".[kubernetes]"

ARG PYTHON
FROM docker.io/library/python:${PYTHON}-slim
LABEL org.opencontainers.image.title="modelpool" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/modelpool /opt/modelpool
# PYTHONSAFEPATH: a folder called operator/ in the working directory must not become a module.
ENV PATH=/opt/modelpool/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /var/lib/modelpool
EXPOSE 8080 9090
ENTRYPOINT ["modelpool"]
CMD ["--help"]
