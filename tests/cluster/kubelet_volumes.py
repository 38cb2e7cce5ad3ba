"""
Volumes of the test kubelet: files in a folder of the Pod.

There is no image and no mount namespace, so a mount path does not exist. Instead every mount path
at the start of a word of ``command``, ``args`` or an environment value is replaced by the folder
that stands for it (:func:`relocated`). ConfigMaps and Secrets are kept up to date while the Pod
runs, each file replaced by rename.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kubelet_api import Api, ApiError
from kubelet_rules import field_value

Object = dict[str, Any]
Tokens = Callable[[str, int], Awaitable[str]]
"""(audience, seconds) -> a service account token of the Pod."""


class NotThere(Exception):
    """A volume names a ConfigMap or Secret that does not exist (yet)."""


class Volumes:
    """The volumes of one Pod below *folder*."""

    def __init__(
        self, api: Api, pod: Object, folder: Path, addresses: Mapping[str, str], tokens: Tokens
    ) -> None:
        self._api = api
        self._pod = pod
        self._folder = folder
        self._addresses = addresses
        self._tokens = tokens

    async def sync(self) -> None:
        """
        Write every file that is missing or has changed.

        Raises:
            NotThere: A ConfigMap or Secret is missing and not optional.
            ApiError, Unreachable: The API server could not be asked.
        """
        for volume in self._pod["spec"].get("volumes") or []:
            folder = self._folder / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            files = await self._files(volume)
            if files is None:
                continue
            for name, content in files.items():
                _replace(folder / name, content)
            wanted = {folder / name for name in files}
            for path in [p for p in folder.rglob("*") if p.is_file() and p not in wanted]:
                path.unlink()

    @property
    def can_change(self) -> bool:
        """Whether any volume has content that can change."""
        volumes = self._pod["spec"].get("volumes") or []
        return any(kind in one for one in volumes for kind in ("configMap", "secret"))

    def mounts(self, container: Object) -> dict[str, Path]:
        """Folder (or file, with a subPath) by mount path."""
        found = {}
        for mount in container.get("volumeMounts") or []:
            path = self._folder / mount["name"]
            if mount.get("subPath"):
                path = path / mount["subPath"]
            found[mount["mountPath"].rstrip("/")] = path
        return found

    async def _files(self, volume: Object) -> dict[str, bytes] | None:
        """Content by relative path; None for a volume that belongs to the containers."""
        if "configMap" in volume:
            return await self._keyed("configmaps", volume["configMap"], "name")
        if "secret" in volume:
            return await self._keyed("secrets", volume["secret"], "secretName")
        if "downwardAPI" in volume:
            return self._downward(volume["downwardAPI"].get("items") or [])
        if "projected" in volume:
            return await self._projected(volume["projected"].get("sources") or [])
        return None  # emptyDir and whatever else is a folder of their own

    async def _projected(self, sources: Iterable[Object]) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for source in sources:
            if "configMap" in source:
                files |= await self._keyed("configmaps", source["configMap"], "name")
            if "secret" in source:
                files |= await self._keyed("secrets", source["secret"], "name")
            if "downwardAPI" in source:
                files |= self._downward(source["downwardAPI"].get("items") or [])
            if "serviceAccountToken" in source:
                wanted = source["serviceAccountToken"]
                seconds = int(wanted.get("expirationSeconds") or 3607)
                token = await self._tokens(wanted.get("audience") or "", seconds)
                files[wanted["path"]] = token.encode()
        return files

    async def _keyed(self, kind: str, source: Object, name_key: str) -> dict[str, bytes]:
        namespace, name = self._pod["metadata"]["namespace"], source[name_key]
        try:
            found = await self._api.get(f"/api/v1/namespaces/{namespace}/{kind}/{name}")
        except ApiError as refused:
            if refused.status == 404:
                if source.get("optional"):
                    return {}
                raise NotThere(f'{kind[:-1]} "{name}" not found') from refused
            raise
        data = contents(found)
        items = source.get("items")
        if items is None:
            return data
        missing = [item["key"] for item in items if item["key"] not in data]
        if missing and not source.get("optional"):
            raise NotThere(f"{kind[:-1]} {name!r} has no key {missing[0]!r}")
        return {item["path"]: data[item["key"]] for item in items if item["key"] in data}

    def _downward(self, items: Iterable[Object]) -> dict[str, bytes]:
        files = {}
        for item in items:
            path = item["fieldRef"]["fieldPath"]
            if path in ("metadata.labels", "metadata.annotations"):
                pairs = self._pod["metadata"].get(path.split(".")[1]) or {}
                text = "\n".join(f'{key}="{value}"' for key, value in sorted(pairs.items()))
            else:
                text = field_value(path, self._pod, self._addresses)
            files[item["path"]] = text.encode()
        return files


def contents(thing: Object) -> dict[str, bytes]:
    """The entries of a ConfigMap or Secret."""
    plain = {key: value.encode() for key, value in (thing.get("data") or {}).items()}
    if thing.get("kind") == "Secret":
        return {key: base64.b64decode(value) for key, value in plain.items()}
    binary = thing.get("binaryData") or {}
    return plain | {key: base64.b64decode(value) for key, value in binary.items()}


def relocated(text: str, mounts: Mapping[str, Path]) -> str:
    """*text* with every mount path at the start of a word replaced; the longest one wins."""
    if not mounts:
        return text
    longest_first = sorted(mounts, key=len, reverse=True)
    pattern = r"(?<![\w/.-])(" + "|".join(map(re.escape, longest_first)) + r")(?=/|[\s:,;'\"]|$)"
    return re.sub(pattern, lambda match: str(mounts[match[1]]), text)


def _replace(path: Path, content: bytes) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)
