"""ModelRouters: one router with the rights it needs, replaced only when it must be."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from memcontrollers import is_ready
from modelpool_api.names import SLOT_ANNOTATION
from modelpool_kube import errors
from modelpool_kube.kinds import (
    CONFIGMAPS,
    DEPLOYMENTS,
    LEASES,
    MODEL_POOLS,
    MODEL_ROUTERS,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    Json,
)
from modelpool_router.app import modelpools
from modelpool_router.settings import ConfigError, Settings, from_mapping
from operatorworld import IMAGE, NS, OperatorWorld

pytestmark = pytest.mark.looptime(idle_timeout=100_000)
CHILDREN = (SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, CONFIGMAPS, DEPLOYMENTS, SERVICES)


@pytest.fixture
async def world() -> AsyncIterator[OperatorWorld]:
    """An empty world; its operators are ended afterwards."""
    found = OperatorWorld()
    yield found
    await found.close()
    assert not found.violations


def router(world: OperatorWorld, name: str = "front", **spec: Any) -> Json:
    """Make a ModelRouter."""
    spec.setdefault("allowAnonymous", True)
    return world.cluster.put(MODEL_ROUTERS, NS, {"metadata": {"name": name}, "spec": spec})


def edit(world: OperatorWorld, **spec: Any) -> None:
    """Edit it."""
    world.cluster.edit(MODEL_ROUTERS, NS, "front", {"spec": spec})


def phase(world: OperatorWorld, wanted: str) -> Any:
    """Return a condition for `run`."""
    return lambda: (
        world.cluster.must(MODEL_ROUTERS, NS, "front").get("status", {}).get("phase") == wanted
    )


def config(world: OperatorWorld) -> Any:
    """Return the configuration that the router reads."""
    return json.loads(world.cluster.must(CONFIGMAPS, NS, "front")["data"]["router.yaml"])


def pod(world: OperatorWorld) -> Any:
    """Return the spec of the router's Pods."""
    return world.cluster.must(DEPLOYMENTS, NS, "front")["spec"]["template"]["spec"]


def rules(world: OperatorWorld) -> dict[str, tuple[list[str], list[str] | None]]:
    """Return what the router may do, by resource."""
    return {
        rule["resources"][0]: (rule["verbs"], rule.get("resourceNames"))
        for rule in world.cluster.must(ROLES, NS, "front")["rules"]
    }


async def test_given_a_router_then_all_it_needs_is_made_and_it_gets_ready(
    world: OperatorWorld,
) -> None:
    world.member("coder")
    world.pool("gpu0", "coder")
    router(world, pools=[{"name": "gpu0"}])
    world.start()

    await world.run(until=phase(world, "Ready"))

    for kind in CHILDREN:
        made = world.cluster.must(kind, NS, "front")
        assert made["metadata"]["ownerReferences"][0]["kind"] == "ModelRouter"
    assert world.cluster.names(LEASES, NS) == ["modelpool-gpu0"]
    made = world.cluster.must(DEPLOYMENTS, NS, "front")
    assert made["spec"]["strategy"] == {"type": "Recreate"}
    assert made["spec"]["replicas"] == 1
    container = pod(world)["containers"][0]
    assert container["image"] == IMAGE
    assert container["args"] == ["serve", "/etc/modelpool/router.yaml"]
    binding = world.cluster.must(ROLE_BINDINGS, NS, "front")
    assert binding["roleRef"]["name"] == "front"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "front", "namespace": NS}]
    front = world.cluster.must(SERVICES, NS, "front")
    assert front["spec"]["selector"] == made["spec"]["selector"]["matchLabels"]
    status = world.cluster.must(MODEL_ROUTERS, NS, "front")["status"]
    assert status["endpoint"] == "http://front.lab.svc:8080"
    assert status["replicas"] == 1


async def test_given_a_router_at_rest_then_ten_resyncs_write_nothing(world: OperatorWorld) -> None:
    world.member("coder")
    world.pool("gpu0", "coder")
    router(world, pools=[{"name": "gpu0"}])
    process = world.start()
    await world.run(until=phase(world, "Ready"))
    await world.run(60)
    before = world.cluster.version

    for _ in range(10):
        process.wake_all()
        await world.run(60)

    assert world.cluster.version == before


async def test_given_the_role_then_it_names_members_and_leases_and_nothing_more(
    world: OperatorWorld,
) -> None:
    world.member("coder")
    world.service("judge", replicas=0)
    world.pool("gpu0", "coder", {"inferenceServiceRef": {"name": "judge"}})
    router(world, pools=[{"name": "gpu0"}])
    world.start()

    await world.run(until=phase(world, "Ready"))

    read = ["get", "list", "watch"]
    found = world.cluster.must(ROLES, NS, "front")["rules"]
    named = [
        (rule["resources"], rule["verbs"], rule["resourceNames"])
        for rule in found
        if "resourceNames" in rule
    ]
    assert named == [
        (["modelpools"], ["list", "watch"], ["gpu0"]),
        (["leases"], ["get", "patch"], ["modelpool-gpu0"]),
        (["inferenceservices"], [*read, "patch"], ["judge"]),
        (["deployments"], [*read, "patch"], ["coder"]),
        (["deployments"], read, ["judge"]),
    ]
    for rule in found:
        writes = set(rule["verbs"]) & {"create", "update", "patch", "delete", "deletecollection"}
        assert not writes or "resourceNames" in rule
        assert "*" not in (*rule["verbs"], *rule["resources"], *rule["apiGroups"])
        assert rule["resources"] != ["secrets"]


async def test_given_a_member_is_added_then_the_role_follows_and_nothing_rolls(
    world: OperatorWorld,
) -> None:
    world.member("coder")
    world.member("judge")
    world.pool("gpu0", "coder")
    router(world, pools=[{"name": "gpu0"}])
    world.start()
    await world.run(until=phase(world, "Ready"))
    pods = world.cluster.names(PODS, NS)

    listed = [{"deploymentRef": {"name": each}} for each in ("coder", "judge")]
    world.cluster.edit(MODEL_POOLS, NS, "gpu0", {"spec": {"members": listed}})
    await world.run(60)

    assert rules(world)["deployments"][1] == ["coder", "judge"]
    assert world.cluster.names(PODS, NS) == pods


async def test_given_a_former_member_then_it_is_in_the_role_until_it_is_let_go_of(
    world: OperatorWorld,
) -> None:
    """Else its router could neither drain it nor take the mark off it."""
    for name in ("coder", "judge"):
        world.member(name)
        mark = {"metadata": {"annotations": {SLOT_ANNOTATION: f"{NS}/modelpool-gpu0:3"}}}
        world.cluster.edit(DEPLOYMENTS, NS, name, mark)
    world.pool("gpu0", "coder", "judge")
    router(world, pools=[{"name": "gpu0"}])
    world.start()
    await world.run(until=phase(world, "Ready"))
    world.hold("gpu0", "front-0")

    listed = [{"deploymentRef": {"name": "coder"}}]
    world.cluster.edit(MODEL_POOLS, NS, "gpu0", {"spec": {"members": listed}})
    for _ in range(6):
        world.hold("gpu0", "front-0")
        await world.run(5)
    assert rules(world)["deployments"][1] == ["coder", "judge"]

    gone = {"metadata": {"annotations": {SLOT_ANNOTATION: None}}}
    world.cluster.edit(DEPLOYMENTS, NS, "judge", gone)
    await world.run(5)
    assert rules(world)["deployments"][1] == ["coder"]


async def test_given_no_pool_then_no_right_is_given_and_replicas_count(
    world: OperatorWorld,
) -> None:
    router(world, upstreams=[{"name": "far", "url": "http://10.0.0.7:8080"}], replicas=3)
    world.start()

    await world.run(until=phase(world, "Ready"))

    assert world.cluster.must(ROLES, NS, "front")["rules"] == []
    assert world.cluster.must(DEPLOYMENTS, NS, "front")["spec"]["replicas"] == 3
    assert world.condition("ReplicasPinned", "front", MODEL_ROUTERS)["reason"] == "AsSpecified"


async def test_given_a_pool_then_replicas_are_pinned_to_one_and_it_says_so(
    world: OperatorWorld,
) -> None:
    world.member("coder")
    world.pool("gpu0", "coder")
    router(world, pools=[{"name": "gpu0"}], replicas=3)
    world.start()

    await world.run(until=phase(world, "Ready"))
    world.cluster.edit(DEPLOYMENTS, NS, "front", {"spec": {"replicas": 2}})
    await world.run(60)

    assert world.cluster.must(DEPLOYMENTS, NS, "front")["spec"]["replicas"] == 1
    found = world.condition("ReplicasPinned", "front", MODEL_ROUTERS)
    assert (found["status"], found["reason"]) == ("True", "Pinned")
    assert "spec.replicas is 3" in found["message"]


async def test_given_pools_that_do_not_exist_then_they_are_named_and_the_router_runs(
    world: OperatorWorld,
) -> None:
    router(world, pools=[{"name": "gpu0"}, {"name": "gpu1"}])
    world.start()

    await world.run(until=phase(world, "Degraded"))

    found = world.condition("PoolsResolved", "front", MODEL_ROUTERS)
    assert (found["status"], found["reason"]) == ("False", "MissingPools")
    assert "gpu0, gpu1" in found["message"]
    assert world.condition("Available", "front", MODEL_ROUTERS)["status"] == "True"
    world.member("coder")
    world.pool("gpu0", "coder")
    world.pool("gpu1", {"name": "x", "deploymentRef": {"name": "other"}})
    await world.run(until=phase(world, "Ready"))


async def test_given_upstreams_of_one_name_then_they_are_told(world: OperatorWorld) -> None:
    upstreams = [
        {"name": "a", "url": "http://h", "models": ["gpt"]},
        {"name": "b", "url": "http://h", "models": ["gpt"]},
    ]
    router(world, upstreams=upstreams)
    world.start()

    await world.run(until=phase(world, "Degraded"))

    said = world.condition("PoolsResolved", "front", MODEL_ROUTERS)
    assert said["reason"] == "DuplicateNames"
    assert said["message"] == (
        "upstream b keeps the router from taking this configuration, because clients could mean "
        "two things by gpt (of upstream a); change spec.upstreams[].name or its models"
    )
    with pytest.raises(ConfigError, match="gpt"):
        from_mapping(config(world))


async def test_given_names_that_clash_then_they_are_told_and_the_router_leaves_out_the_same(
    world: OperatorWorld,
) -> None:
    for name in ("coder", "judge", "poet", "clerk"):
        world.member(name)
    profile = {"profile": "llama-server"}
    aliased = {"deploymentRef": {"name": "judge"}, "models": ["coder"], **profile}
    twice = [
        {"deploymentRef": {"name": "poet"}, "models": ["rhyme"], **profile},
        {"deploymentRef": {"name": "clerk"}, "models": ["rhyme"], **profile},
    ]
    world.pool("gpu0", "coder")
    world.pool("gpu1", aliased)
    world.pool("gpu2", *twice)
    router(world, pools=[{"name": f"gpu{index}"} for index in range(3)])
    world.start()

    await world.run(until=phase(world, "Degraded"))

    said = world.condition("PoolsResolved", "front", MODEL_ROUTERS)
    assert said["reason"] == "DuplicateNames"
    assert "ModelPool gpu1 is left out" in said["message"]
    assert "by coder (of ModelPool gpu0); change spec.members[].name" in said["message"]
    assert "ModelPool gpu2 is left out" in said["message"]
    assert "rhyme (twice in it)" in said["message"]
    pools = {
        each["metadata"]["name"]: modelpools.pool_of(each, {})
        for each in world.cluster.all(MODEL_POOLS)
    }
    served = modelpools.beside(Settings.model_validate({}), pools)
    assert [each.name for each in served.pools] == ["gpu0"]

    change = {"spec": {"members": [{**aliased, "models": ["critic"]}]}}
    world.cluster.edit(MODEL_POOLS, NS, "gpu1", change)
    world.cluster.edit(MODEL_POOLS, NS, "gpu2", {"spec": {"members": twice[:1]}})
    await world.run(until=phase(world, "Ready"))
    said = world.condition("PoolsResolved", "front", MODEL_ROUTERS)
    assert said["reason"] == "AllResolved"


@pytest.mark.parametrize(
    "change",
    [
        {"upstreams": [{"name": "far", "url": "http://10.0.0.8:8080"}]},
        {"maxHeld": 5},
        {"holdKeepalive": "comment"},
        {"shutdownTimeout": "5m"},
        {"service": {"type": "NodePort"}},
        {"pools": [{"name": "gpu0"}, {"name": "gpu1"}]},
    ],
)
async def test_given_a_change_of_configuration_then_no_pod_is_replaced(
    world: OperatorWorld, change: Any
) -> None:
    world.member("coder")
    world.pool("gpu0", "coder")
    router(world, pools=[{"name": "gpu0"}])
    world.start()
    await world.run(until=phase(world, "Ready"))
    pods = world.cluster.names(PODS, NS)

    edit(world, **change)
    await world.run(120)

    assert world.cluster.names(PODS, NS) == pods
    for key in ("maxHeld", "holdKeepalive", "shutdownTimeout"):
        if key in change:
            assert config(world)[key] == change[key]
    if "pools" in change:
        assert config(world)["poolsFrom"]["names"] == ["gpu0", "gpu1"]
    if "service" in change:
        assert world.cluster.must(SERVICES, NS, "front")["spec"]["type"] == "NodePort"


@pytest.mark.parametrize(
    "change",
    [
        {"image": "modelpool:other"},
        {"port": 9000},
        {"resources": {"limits": {"memory": "2Gi"}}},
    ],
)
async def test_given_what_no_running_process_takes_in_then_it_is_replaced_and_never_two_run(
    world: OperatorWorld, change: Any
) -> None:
    world.member("coder")
    world.pool("gpu0", "coder")
    router(world, pools=[{"name": "gpu0"}])
    world.start()
    await world.run(until=phase(world, "Ready"))
    pods = world.cluster.names(PODS, NS)
    most = 0

    def count(_: object) -> None:
        nonlocal most
        most = max(most, len(world.cluster.all(PODS, NS)))

    world.cluster.after_write.append(count)
    edit(world, **change)
    await world.run(120)

    assert world.cluster.names(PODS, NS) != pods
    assert most == 1
    assert all(map(is_ready, world.cluster.all(PODS, NS)))


async def test_given_the_pod_then_it_is_allowed_where_pods_are_restricted(
    world: OperatorWorld,
) -> None:
    router(world, upstreams=[{"name": "far", "url": "http://10.0.0.7:8080"}])
    world.start()

    await world.run(60)

    spec = pod(world)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in spec["containers"]:
        context = each["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not any(port.get("hostPort") for port in each["ports"])
    assert not any(key in spec for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert {next(k for k in v if k != "name") for v in spec["volumes"]} == {"configMap", "emptyDir"}
    grace = spec["terminationGracePeriodSeconds"]
    assert grace == 5 + 30 + 15


async def test_given_keys_then_secrets_are_mounted_and_never_read(world: OperatorWorld) -> None:
    upstream = {
        "name": "far",
        "url": "https://example.org/x",
        "models": ["gpt-x"],
        "apiKey": {"name": "far-key", "key": "token"},
        "responseTimeout": "30s",
    }
    router(world, upstreams=[upstream], keys={"name": "clients"}, allowAnonymous=False)
    process = world.start()

    await world.run(until=phase(world, "Ready"))

    assert config(world)["keys"] == {"file": "/etc/modelpool-keys/keys"}
    assert "allowAnonymous" not in config(world)
    assert config(world)["upstreams"] == [
        {
            "name": "far",
            "url": "https://example.org/x",
            "models": ["gpt-x"],
            "apiKey": {"file": "/etc/modelpool-upstreams/far-key/token"},
            "responseTimeout": "30s",
        }
    ]
    mounted = {each["name"]: each for each in pod(world)["volumes"]}
    assert mounted["keys"]["secret"] == {"secretName": "clients"}
    assert mounted["upstream-keys"]["projected"]["sources"] == [
        {"secret": {"name": "far-key", "items": [{"key": "token", "path": "far-key/token"}]}}
    ]
    assert not [each for each in process.port.requests if each.kind.plural == "secrets"]


async def test_given_the_configuration_then_the_router_takes_it(world: OperatorWorld) -> None:
    from modelpool_router.settings.loading import from_mapping

    router(
        world,
        upstreams=[{"name": "far", "url": "http://10.0.0.7:8080", "models": ["m"]}],
        holdKeepalive="comment",
        maxHeldBytes=200_000_000,
    )
    world.start()
    await world.run(60)

    settings = from_mapping(config(world))

    assert str(settings.listen) == "0.0.0.0:8080"
    assert settings.max_held_bytes == 200_000_000
    assert settings.upstreams[0].models == ("m",)


@pytest.mark.parametrize("kind", CHILDREN)
async def test_given_somebody_elses_object_of_that_name_then_nothing_is_touched(
    world: OperatorWorld, kind: Any
) -> None:
    body: Json = {"metadata": {"name": "front"}}
    if kind == DEPLOYMENTS:
        from memcontrollers import deployment

        body = deployment("front")
    world.cluster.put(kind, NS, body)
    router(world, upstreams=[{"name": "far", "url": "http://10.0.0.7:8080"}])
    world.start()
    before = world.cluster.must(kind, NS, "front")

    await world.run(until=phase(world, "Failed"))
    await world.run(60)

    status = world.cluster.must(MODEL_ROUTERS, NS, "front")["status"]
    assert kind.kind in status["message"]
    after = world.cluster.must(kind, NS, "front")
    assert after["metadata"].get("annotations") == before["metadata"].get("annotations")
    assert sum(len(world.cluster.names(each, NS)) for each in CHILDREN) == 1


async def test_given_what_was_made_is_edited_or_deleted_then_it_is_mended(
    world: OperatorWorld,
) -> None:
    router(world, upstreams=[{"name": "far", "url": "http://10.0.0.7:8080"}])
    world.start()
    await world.run(until=phase(world, "Ready"))

    for kind in CHILDREN:
        world.cluster.remove(kind, NS, "front")
    await world.run(120)

    assert all(world.cluster.names(kind, NS) == ["front"] for kind in CHILDREN)
    assert world.cluster.must(MODEL_ROUTERS, NS, "front")["status"]["phase"] == "Ready"


async def test_given_it_is_deleted_then_its_children_go_and_the_pool_stays(
    world: OperatorWorld,
) -> None:
    world.member("coder")
    world.pool("gpu0", "coder")
    router(world, pools=[{"name": "gpu0"}])
    world.start()
    await world.run(until=phase(world, "Ready"))

    world.cluster.remove(MODEL_ROUTERS, NS, "front")
    await world.run(120)

    for kind in (SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, CONFIGMAPS, SERVICES):
        assert world.cluster.names(kind, NS) == []
    assert world.cluster.names(DEPLOYMENTS, NS) == ["coder"]
    assert world.cluster.names(LEASES, NS) == ["modelpool-gpu0"]


async def test_given_its_deployment_is_refused_then_it_is_pending(world: OperatorWorld) -> None:
    router(world)
    process = world.start()
    process.port.fail(errors.Forbidden("exceeded quota"), verb="create", kind=DEPLOYMENTS, times=9)

    await world.run(5)

    status = world.cluster.must(MODEL_ROUTERS, NS, "front")["status"]
    assert status["phase"] == "Pending"
    ready = {each["type"]: each["status"] for each in status["conditions"]}
    assert ready["Ready"] == "False"
    await world.run(until=phase(world, "Ready"))
