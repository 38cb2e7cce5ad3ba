"""Up: everybody else proven gone, one replica, evidence; then watched until the end of the life."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from dataclasses import replace

from modelpool_kube.errors import Forbidden
from modelpool_kube.kinds import Json, uid
from modelpool_kube.record import Phase, SlotRecord
from modelpool_kube.slotrules import NotReady, NotYet, Probe, Ready

from ..core.spec import MemberName
from .base import ActivationFailed, DriverUnavailable, Endpoint
from .kube_life import Life
from .kube_members import KubeMember
from .kube_moving import Moving
from .kube_pods import Trouble, address_of, life_of, load_trouble, loss_of, port_of, unschedulable
from .kube_record import landed_record
from .profiles import Readiness


class Loading(Moving):
    """Brings members up."""

    def _refuse_company(self, member: MemberName) -> None:
        if others := self._lives.keys() - {member}:
            raise DriverUnavailable(f"cannot start {member}: {min(others)} is not gone")

    def _fail_if_over(self, life: Life) -> None:
        if life.is_lost:
            raise ActivationFailed("exited", life.waits_for)
        if life.is_stopping:
            if not self._is_adopted:
                raise DriverUnavailable(self.standing.withheld or "the driver is closed")
            raise ActivationFailed("stopped", "it was taken down while it loaded")

    async def _scale_up(self, life: Life) -> None:
        """Prove everybody else gone and ask for one replica, in one epoch."""
        member = life.spec.name

        def announce(record: SlotRecord) -> SlotRecord:
            owner = record.owner if record.owner == member else None
            return replace(
                record,
                owner=owner,
                target=str(member),
                phase=Phase.LOADING,
                released=False,
                reason="",
            )

        async def attempt() -> str | None:
            async with self._act:
                self._refuse_withheld()
                begun = await self._epoch_for(life, announce)
                for other in self._all_members():
                    if other.slot_member == life.spec.slot_member:
                        continue
                    found = await self._look_gone(other, begun)
                    if isinstance(found, NotYet):
                        if found.reason == "NotScaledDown":
                            await self._stop_stray(other, begun)
                        life.waits_for = f"{other.name} is not gone: {found.detail}"
                        return f"cannot start {member}: {life.waits_for}"
                self._fail_if_over(life)
                if life.before is None:
                    life.before = frozenset(map(uid, await self._pods_before(life.spec)))
                await self._scale(life.spec, begun, up=True)
            life.is_scaled = True
            return None

        await self._act_on(
            life,
            self._repeat(
                attempt, check=lambda: self._fail_if_over(life), limit_s=self._limits.gone_s
            ),
        )

    async def _act_on(self, life: Life, work: Awaitable[None]) -> None:
        try:
            await work
        except Forbidden as error:
            raise ActivationFailed("Forbidden", str(error), retryable=False) from error

    async def _wait_until_ready(self, life: Life) -> Endpoint:
        """Wait for evidence: a running Pod in our epoch, and an answer of its own to us."""
        refused_since: float | None = None
        poll_s = self._limits.poll_s
        while True:
            self._fail_if_over(life)
            pulse = self._pulse
            self._fail_on_trouble(life)
            if life.endpoint is not None:
                return life.endpoint  # a second caller waited as well
            pod = await self._candidate(life)
            if pod is None:
                await self._rest(pulse, self._limits.resync_s)
                continue
            port = life.spec.port or port_of(pod)
            if port is None:
                raise ActivationFailed(
                    "NoPort",
                    f"no container of {life.spec} declares a port; write `port` to the member",
                    retryable=False,
                )
            while not pulse.is_set():
                probed_at = self._port.now()
                answer = await self._readiness(life.spec, address_of(pod), port)
                self._fail_if_over(life)
                if answer is Readiness.READY:
                    await self._land(life, pod, port, Probe(uid(pod), probed_at))
                    break
                if answer is not Readiness.FAILED:
                    refused_since = None
                elif refused_since is None:
                    refused_since = self._loop.time()
                elif self._loop.time() - refused_since >= self._limits.refused_after_s:
                    raise ActivationFailed(
                        "readiness_refused",
                        f"GET {life.spec.profile.readiness_path} is answered, but never with "
                        "success; correct the profile or readinessPath",
                        retryable=False,
                    )
                with suppress(TimeoutError):
                    async with asyncio.timeout(poll_s):
                        await pulse.wait()
                poll_s = min(poll_s * 1.5, self._limits.most_poll_s)
            if pulse.is_set():
                await asyncio.sleep(self._limits.settle_s)

    async def _pods_before(self, member: KubeMember) -> list[Json]:
        """Return the Pods that are there before a load: what became of them is none of its."""
        if self._watch.has_seen_pods(member):
            return self._watch.pods_of(member)
        return await self._pods_now(member)

    def _fail_on_trouble(self, life: Life) -> None:
        before = life.before or frozenset()
        pods = [pod for pod in self._watch.pods_of(life.spec) if uid(pod) not in before]
        trouble = load_trouble(pods) or self._unschedulable(life.spec, pods)
        if trouble is not None:
            life.is_lost = True
            life.waits_for = trouble.detail
            raise ActivationFailed(trouble.reason, trouble.detail, retryable=trouble.retryable)

    def _unschedulable(self, spec: KubeMember, pods: Iterable[Json]) -> Trouble | None:
        since: dict[str, float] = {}
        found: Trouble | None = None
        for pod in pods:
            why = unschedulable(pod)
            if why is None:
                continue
            at = since[uid(pod)] = self._unschedulable_since.get(uid(pod), self._loop.time())
            limit_s = spec.unschedulable_after_s
            if limit_s is not None and self._loop.time() - at >= limit_s:
                found = Trouble("Unschedulable", f"no node takes it after {limit_s:g} s: {why}")
        self._unschedulable_since = since
        return found

    async def _candidate(self, life: Life) -> Json | None:
        """Return the Pod that is worth a probe; scale up again if our scaling was undone."""
        found: list[Ready | NotReady] = []

        async def attempt() -> str | None:
            begun = self._current()
            if begun is None:
                life.is_scaled = False
                return None
            found.append(await self._actuator.look_ready(life.spec.slot_member, begun, None))
            return None

        await self._act_on(life, self._repeat(attempt, check=lambda: self._fail_if_over(life)))
        if found and isinstance(found[0], NotReady):
            reason = found[0].reason
            life.waits_for = found[0].detail
            if reason == "MemberMissing":
                raise ActivationFailed(reason, found[0].detail)
            if reason in ("NotFenced", "NotScaledUp"):
                self._begun = None
                life.is_scaled = False
        if not life.is_scaled:
            async with self._turn(life.spec.name):
                if not life.is_scaled:
                    await self._scale_up(life)
            return None
        result = found[0]
        pod = result.pod if isinstance(result, Ready) else result.candidate
        return pod

    async def _land(self, life: Life, pod: Json, port: int, probe: Probe) -> None:
        """Complete the evidence with *probe*; if it holds, record the landing and let it serve."""
        landed: list[Json] = []

        async def attempt() -> str | None:
            begun = self._current()
            if begun is None:
                return None
            found = await self._actuator.look_ready(life.spec.slot_member, begun, probe)
            if isinstance(found, NotReady):
                return None
            await self._keeper.write(
                lambda record: self._dated(record or SlotRecord(), landed_record(life.spec.name))
            )
            if self._current() is begun:
                landed.append(found.pod)
            return None

        await self._act_on(life, self._repeat(attempt, check=lambda: self._fail_if_over(life)))
        if landed and life.endpoint is None:
            parallel = await self._reported_parallel(life.spec, address_of(pod), port)
            self._fail_if_over(life)
            self._begin_life(life, landed[0], port, parallel)

    def _begin_life(self, life: Life, pod: Json, port: int, parallel: int | None) -> None:
        spec = life.spec
        life.is_scaled = True
        life.lives = life_of(pod)
        life.pod_name = str(pod["metadata"]["name"])
        life.address = (address_of(pod), port)
        host = address_of(pod)
        if spec.service is not None:
            host = f"{spec.service}.{spec.namespace}.svc"
        life.endpoint = Endpoint(host=host, port=port, identity=str(life.lives), parallel=parallel)
        self._own(self._watch_life(life), f"watch {spec.name}")

    def _check_life(self, life: Life) -> None:
        if life.endpoint is None or life.is_over:
            return
        pod = self._watch.pod(life.spec.namespace, life.pod_name)
        if pod is not None and uid(pod) != life.lives.pod_uid:
            pod = None
        life.is_watched = life.is_watched or pod is not None
        if not life.is_watched:
            return  # the watch is behind what was read
        trouble = loss_of(pod, life.lives)
        if trouble is not None:
            self._report_lost(life, trouble.reason, trouble.detail)

    def _report_lost(self, life: Life, reason: str, detail: str) -> None:
        if not life.is_over and self._lives.get(life.spec.name) is life:
            life.is_lost = True
            life.waits_for = detail
            self._lost(life.spec.name, reason, detail)

    async def _watch_life(self, life: Life) -> None:
        """Look at the port of a resident: the API server may be away, or not know it yet."""
        self._check_life(life)
        refusals = 0
        while not life.is_over and self._lives.get(life.spec.name) is life:
            await asyncio.sleep(self._limits.look_again_s if refusals else self._limits.look_s)
            refused = await self._prober.refuses(*life.address)
            refusals = refusals + 1 if refused else 0
            if refusals > 1:
                host, port = life.address
                self._report_lost(life, "port_closed", f"nobody listens on {host}:{port} any more")
