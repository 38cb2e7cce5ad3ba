"""What tests of a ModelDeployment on a real cluster stand on: queues, edits, what is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from cluster_kubectl import KubectlFailed
from cluster_objects import GPU, container, queues
from cluster_operator import install
from cluster_roles import OPERATOR
from harness import OwnCluster
from modelpool_api.names import (
    MEMBER_INDEX_LABEL,
    OPERATOR_MANAGER,
    REPLACEMENTS_ANNOTATION,
    group_name,
)
from modelpool_kube.client import KubeClient, connect
from modelpool_kube.errors import KubeError, NotFound
from modelpool_kube.kinds import (
    INSTANCE_TYPES,
    MODEL_DEPLOYMENTS,
    PODS,
    SERVICES,
    WORKLOADS,
    Json,
    annotation,
    meta,
    uid,
)
from modelpool_operator.engine.modeldeployment import ModelDeployments
from modelpool_operator.plan.modeldeployment.actions import Note
from modelpool_operator.plan.modeldeployment.sight import condition_status

NODE = "md-node"
SLICE = "nvidia.com/gpumem-percentage"
CORES = "nvidia.com/gpucores"


def role(name: str = "server", **fields: Any) -> Json:
    """Return a role that runs until it is ended."""
    return {
        "name": name,
        "image": "modelpool.test/any",
        "command": ["sleep", "1000"],
        "terminationGracePeriodSeconds": 15,
        **fields,
    }


class Ground:
    """
    One namespace with queues and types, and an operator that looks again and again.

    Args of the constructor:
        own: The cluster.
        client: With the rights of a person, for the test.
        acting: With the rights of the operator and no others.
        namespace: Where.

    Attributes:
        looks: Whether the operator in here looks; not while a process of its own does.
    """

    def __init__(
        self, own: OwnCluster, client: KubeClient, acting: KubeClient, namespace: str
    ) -> None:
        self.own = own
        self.looks = True
        self.client = client
        self._acting = acting
        self.namespace = namespace
        self.told: list[str] = []
        self.trouble: list[str] = []
        self.operator = ModelDeployments(acting, self._tell)

    async def _tell(self, obj: Json, note: Note) -> None:
        self.told.append(f"{note.reason.value}: {note.message}")

    def restart(self) -> None:
        """Go on with an operator that remembers nothing."""
        self.operator = ModelDeployments(self._acting, self._tell)

    async def type(self, name: str, *, gpus: int) -> str:
        """Make a queue and an InstanceType on it; return its name."""
        made = f"{self.namespace}-{name}"
        self.own.kubectl.apply(*queues(self.namespace, made, gpus=gpus))
        spec = {"queueName": made, "accelerator": {"card": GPU}}
        await self.client.create(INSTANCE_TYPES, None, INSTANCE_TYPES.body(made, spec=spec))
        return made

    async def deploy(self, *roles: Json) -> None:
        """Make the deployment."""
        spec = {
            "model": {"name": "tiny"},
            "engine": {"name": "Custom"},
            "roles": list(roles),
        }
        body = MODEL_DEPLOYMENTS.body("chat", self.namespace, spec=spec)
        await self.client.create(MODEL_DEPLOYMENTS, self.namespace, body)

    async def edit(self, name: str = "server", **fields: Any) -> None:
        """Change fields of one role; None removes one."""
        roles = (await self.deployment())["spec"]["roles"]
        for each in roles:
            if each["name"] == name:
                for key, value in fields.items():
                    each.pop(key, None)
                    if value is not None:
                        each[key] = value
        patch = {"spec": {"roles": roles}}
        await self.client.patch_merge(MODEL_DEPLOYMENTS, self.namespace, "chat", patch)

    async def deployment(self) -> Json:
        """Return the deployment."""
        return await self.client.get(MODEL_DEPLOYMENTS, self.namespace, "chat")

    async def pods(self, ordinal: int | None = None, name: str = "server") -> list[Json]:
        """Return members by name."""
        labels = f"app.kubernetes.io/component={name}"
        if ordinal is not None:
            labels += f",modelpool.dev/ordinal={ordinal}"
        items = (await self.client.list(PODS, self.namespace, labels=labels)).items
        return sorted(items, key=lambda pod: str(meta(pod)["name"]))

    async def uids(self, ordinal: int | None = None, name: str = "server") -> set[str]:
        """Return the UIDs of members."""
        return {uid(pod) for pod in await self.pods(ordinal, name)}

    async def workload(self, ordinal: int = 0, name: str = "server") -> Json:
        """Return the Workload of a replica; empty when there is none."""
        try:
            group = group_name(self.namespace, "chat", name, ordinal)
            return await self.client.get(WORKLOADS, self.namespace, group)
        except NotFound:
            return {}

    async def is_admitted(self, ordinal: int = 0, name: str = "server") -> bool:
        """Return whether a replica is admitted."""
        return condition(await self.workload(ordinal, name), "Admitted") == "True"

    async def slot(self, name: str = "server") -> Json:
        """Return the replacement of a role; empty when there is none."""
        text = annotation(await self.deployment(), REPLACEMENTS_ANNOTATION)
        found: Json = json.loads(text).get(name, {}) if text else {}
        return found

    async def delete(self) -> None:
        """Delete the deployment, and wait until it has gone."""
        with contextlib.suppress(NotFound):
            await self.client.delete(MODEL_DEPLOYMENTS, self.namespace, "chat")
        async with asyncio.timeout(90):
            while self.own.kubectl.items("modeldeployments", "-n", self.namespace):
                await self.turn()

    async def strangers(self) -> set[str]:
        """Make a Pod, a Service and a Workload of somebody else; return their UIDs."""
        spec = {"containers": [container("sleep", "1000")], "terminationGracePeriodSeconds": 1}
        port = {"port": 1, "targetPort": 1}
        made = [
            await self.client.create(PODS, self.namespace, PODS.body("other", spec=spec)),
            await self.client.create(
                SERVICES, self.namespace, SERVICES.body("other", spec={"ports": [port]})
            ),
            await self.client.create(WORKLOADS, self.namespace, foreign_workload("other")),
        ]
        return {uid(each) for each in made}

    async def standing(self) -> set[str]:
        """Return the UIDs of all Pods, Services and Workloads."""
        kinds = (PODS, SERVICES, WORKLOADS)
        lists = [(await self.client.list(kind, self.namespace)).items for kind in kinds]
        return {uid(each) for items in lists for each in items}

    async def versions(self) -> dict[str, str]:
        """Return UID and resourceVersion of everything that an operator may write."""
        kinds = (MODEL_DEPLOYMENTS, PODS, SERVICES, WORKLOADS)
        lists = [(await self.client.list(kind, self.namespace)).items for kind in kinds]
        return {uid(each): meta(each)["resourceVersion"] for items in lists for each in items}

    async def only_members(self, rule: str | None) -> None:
        """Let the API server take no other members than *rule*, in CEL, has it; None: any."""
        kubectl, name = self.own.kubectl, self.namespace
        await asyncio.to_thread(self._only_members, rule)
        probe = PODS.body("probe", name, spec={"containers": [container("sleep", "1")]})
        probe["metadata"]["labels"] = {MEMBER_INDEX_LABEL: "1"}
        async with asyncio.timeout(30):
            while True:
                try:
                    args = ("create", "--dry-run=server", "-f", "-")
                    await asyncio.to_thread(kubectl, *args, stdin=json.dumps(probe))
                    is_refused = False
                except KubectlFailed:
                    is_refused = True
                if is_refused == (rule is not None):
                    return
                await asyncio.sleep(0.2)

    def _only_members(self, rule: str | None) -> None:
        name = self.namespace
        kinds = ("ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy")
        for kind in kinds:
            self.own.kubectl("delete", kind, name, "--ignore-not-found")
        if rule is None:
            return
        pods = {
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "operations": ["CREATE"],
            "resources": ["pods"],
        }
        here = {"matchLabels": {"kubernetes.io/metadata.name": name}}
        ours = f"has(object.metadata.labels) && '{MEMBER_INDEX_LABEL}' in object.metadata.labels"
        specs: list[Json] = [
            {"policyName": name, "validationActions": ["Deny"]},
            {
                "failurePolicy": "Fail",
                "matchConstraints": {"namespaceSelector": here, "resourceRules": [pods]},
                "matchConditions": [{"name": "ours", "expression": ours}],
                "validations": [{"expression": rule, "message": "not now"}],
            },
        ]
        version = "admissionregistration.k8s.io/v1"
        for kind, spec in reversed(list(zip(kinds, specs, strict=True))):
            self.own.kubectl.apply(
                {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
            )

    async def turn(self) -> None:
        """Let the operator look once."""
        try:
            if self.looks:
                await self.operator.reconcile((self.namespace, "chat"))
        except KubeError as error:
            self.trouble.append(str(error))
        await asyncio.sleep(0.2)

    async def until(self, ask: Callable[[Json], bool], what: str, timeout_s: float = 90.0) -> Json:
        """Let the operator look until the deployment is as *ask* wants it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    await self.turn()
                    found = await self.deployment()
                    if ask(found):
                        return found
        found = await self.deployment()
        raise AssertionError(f"not in {timeout_s} s: {what}: {found} {self.told} {self.trouble}")

    async def rest(self) -> Json:
        """Let the operator look until everything is as specified and ready."""
        return await self.until(is_at_rest, "at rest")


def condition(obj: Json, kind: str) -> str | None:
    """Return the status of a condition of *obj*, or None."""
    return condition_status(obj.get("status") or {}, kind)


def is_at_rest(deployment: Json) -> bool:
    """Return whether everything is as specified and ready."""
    status = deployment.get("status") or {}
    return (
        status.get("observedGeneration") == meta(deployment)["generation"]
        and status.get("phase") == "Ready"
        and condition(deployment, "ReplicasUpToDate") == "True"
        and annotation(deployment, REPLACEMENTS_ANNOTATION) is None
    )


def waits(deployment: Json) -> bool:
    """Return whether a replacement waits for its admission, with a Workload."""
    return "currentWorkloadUID" in (annotation(deployment, REPLACEMENTS_ANNOTATION) or "")


def foreign_workload(name: str) -> Json:
    """Return a Workload that somebody else made."""
    spec = {"containers": [{"name": "c", "image": "i"}], "restartPolicy": "Never"}
    pod_set = {"name": "main", "count": 1, "template": {"spec": spec}}
    return WORKLOADS.body(name, spec={"queueName": "none", "podSets": [pod_set]})


@contextlib.asynccontextmanager
async def replacing(own: OwnCluster, namespace: str) -> AsyncIterator[Ground]:
    """Offer a namespace to replace replicas in; everything of it is gone afterwards."""
    own.node(NODE, {GPU: 8, SLICE: 200, CORES: 200})
    install(own.kubectl)
    account = str(own.service_account(*OPERATOR))
    async with (
        await connect(manager="test", kubeconfig=str(own.kubeconfig)) as client,
        await connect(manager=OPERATOR_MANAGER, kubeconfig=account) as acting,
    ):
        made = Ground(own, client, acting, namespace)
        yield made
        made.looks = True
        await made.only_members(None)
        await made.delete()
        own.kubectl("delete", "instancetypes", "--all")
        own.kubectl("delete", "localqueues", "--all", "-n", namespace)
        for kind in ("clusterqueue", "resourceflavor"):
            for name in ("a", "b"):
                own.kubectl("delete", kind, f"{namespace}-{name}", "--ignore-not-found")
