"""The two profiles of the Pod Security Standards, as far as our Pods can break them."""

from __future__ import annotations

from collections.abc import Iterator

from modelpool_kube.kinds import Json

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""Kinds of volumes that a restricted Pod may have."""
CAPABILITIES = {
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
}
"""Capabilities that a baseline container may add."""


def _containers(spec: Json) -> list[Json]:
    return [*spec["containers"], *spec.get("initContainers", [])]


def baseline_breaches(spec: Json) -> Iterator[str]:
    """Yield what of the baseline profile *spec* breaks."""
    pod = spec.get("securityContext", {})
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield key
    if pod.get("seccompProfile", {}).get("type") == "Unconfined":
        yield "seccompProfile is Unconfined"
    if pod.get("sysctls"):
        yield "sysctls"
    for volume in spec.get("volumes", []):
        if "hostPath" in volume:
            yield f"hostPath of volume {volume['name']}"
    for each in _containers(spec):
        context = each.get("securityContext", {})
        if context.get("privileged"):
            yield "privileged"
        if not set(context.get("capabilities", {}).get("add", [])) <= CAPABILITIES:
            yield "capabilities are added"
        if context.get("seccompProfile", {}).get("type") == "Unconfined":
            yield "seccompProfile is Unconfined"
        if any(port.get("hostPort") for port in each.get("ports", [])):
            yield "hostPort"


def restricted_breaches(spec: Json) -> Iterator[str]:
    """Yield what of the restricted profile *spec* breaks, the baseline included."""
    yield from baseline_breaches(spec)
    pod = spec.get("securityContext", {})
    for volume in spec.get("volumes", []):
        if not set(volume) - {"name"} <= VOLUMES:
            yield f"kind of volume {volume['name']}"
    for each in _containers(spec):
        context = each.get("securityContext", {})
        seccomp = context.get("seccompProfile", pod.get("seccompProfile", {}))
        if seccomp.get("type") not in ("RuntimeDefault", "Localhost"):
            yield "seccompProfile"
        if context.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation"
        capabilities = context.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []):
            yield "capabilities are kept"
        if not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}:
            yield "capabilities are added"
        if context.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
            yield "runAsNonRoot"
        if context.get("runAsUser", pod.get("runAsUser")) == 0:
            yield "runAsUser"


BREACHES = {"baseline": baseline_breaches, "restricted": restricted_breaches}
"""Checkers by the name of the profile, as in the label of a namespace."""
