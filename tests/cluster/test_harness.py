"""The ground of the cluster tier holds: a real control plane, a real Kueue, Pods as processes."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import pytest

from cluster_kubectl import Kubectl, KubectlFailed, until
from cluster_objects import GPU, PORT, container, deployment, grouped, member_container, pod, queues
from harness import Cluster, OwnCluster

pytestmark = pytest.mark.cluster

Object = dict[str, Any]


def pods_of(kubectl: Kubectl, namespace: str, app: str) -> list[Object]:
    return kubectl.items("pods", "-n", namespace, "-l", f"app={app}")


def is_ready(one: Object) -> bool:
    conditions = (one.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def ready_pod(kubectl: Kubectl, namespace: str, app: str) -> Object:
    def found() -> Object | None:
        return next((one for one in pods_of(kubectl, namespace, app) if is_ready(one)), None)

    one = until(found, f"a ready Pod of {app}")
    assert one is not None
    return one


def phase_of(kubectl: Kubectl, namespace: str, name: str) -> str:
    return str((kubectl.get("pod", name, "-n", namespace).get("status") or {}).get("phase"))


def status_of(kubectl: Kubectl, namespace: str, name: str) -> Object:
    """The status of a Pod's first container, empty before there is one."""
    found = kubectl.get("pod", name, "-n", namespace).get("status") or {}
    statuses = found.get("containerStatuses") or [{}]
    first: Object = statuses[0]
    return first


def waits_for(kubectl: Kubectl, namespace: str, name: str, reason: str) -> Object:
    def waiting() -> Object | None:
        state = (status_of(kubectl, namespace, name).get("state") or {}).get("waiting") or {}
        return state if state.get("reason") == reason else None

    state = until(waiting, f"Pod {name} waits with {reason}")
    assert state is not None
    return state


def terminated(kubectl: Kubectl, namespace: str, name: str) -> Object:
    def state() -> Object | None:
        return (status_of(kubectl, namespace, name).get("state") or {}).get("terminated")

    found = until(state, f"the container of Pod {name} ended")
    assert found is not None
    return found


def answer(address: str, path: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}:{PORT}{path}", timeout=10) as reply:
        return str(reply.read().decode())


def scale(kubectl: Kubectl, namespace: str, app: str, replicas: int) -> None:
    kubectl("scale", "deployment", app, f"--replicas={replicas}", "-n", namespace)


# -- the control plane ---------------------------------------------------------------------------


def test_kubectl_and_server_are_of_one_version_and_the_node_offers_its_gpu(own: OwnCluster) -> None:
    version = json.loads(own.kubectl("version", "-o", "json"))
    table = own.kubectl("get", "nodes")

    assert version["serverVersion"]["gitVersion"] == version["clientVersion"]["gitVersion"]
    assert "gpu-0   Ready" in table
    assert own.kubectl.get("node", "gpu-0")["status"]["allocatable"][GPU] == "1"


def test_a_user_has_the_rights_of_its_role_and_no_others(cluster: Cluster, namespace: str) -> None:
    reader = cluster.as_user(cluster.user("reader"))
    role = ("role", "reader", "--verb=get,list", "--resource=pods", "-n", namespace)
    binding = ("rolebinding", "reader", "--role=reader", "--user=reader", "-n", namespace)

    cluster.kubectl("create", *role)
    cluster.kubectl("create", *binding)

    assert reader.items("pods", "-n", namespace) == []
    with pytest.raises(KubectlFailed, match="Forbidden"):
        reader("get", "secrets", "-n", namespace)


def test_a_service_accounts_token_is_taken_for_that_account(
    cluster: Cluster, namespace: str
) -> None:
    account = cluster.as_user(cluster.service_account(namespace, "default"))

    said = account("auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")

    assert said == f"system:serviceaccount:{namespace}:default"


def test_everything_goes_on_when_the_api_server_comes_back(own: OwnCluster, namespace: str) -> None:
    own.kubectl.apply(deployment(namespace, "a", member_container()))
    before = ready_pod(own.kubectl, namespace, "a")
    address = before["status"]["podIP"]

    own.stop_apiserver()
    assert answer(address, "/health")
    own.start_apiserver()
    after = ready_pod(own.kubectl, namespace, "a")
    scale(own.kubectl, namespace, "a", 0)

    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    until(lambda: not pods_of(own.kubectl, namespace, "a"), "the Pod is gone")


# -- Pods as processes ----------------------------------------------------------------------------


def test_a_second_member_waits_until_the_pod_of_the_first_is_gone(
    own: OwnCluster, namespace: str
) -> None:
    own.kubectl.apply(deployment(namespace, "a", member_container("--name", "a", "--unload", "1")))
    first = ready_pod(own.kubectl, namespace, "a")
    own.kubectl.apply(deployment(namespace, "b", member_container("--name", "b")))

    def refusal() -> str:
        pods = pods_of(own.kubectl, namespace, "b")
        conditions = pods[0]["status"].get("conditions") or [] if pods else []
        return next((c["message"] for c in conditions if c.get("reason") == "Unschedulable"), "")

    assert "Insufficient nvidia.com/gpu" in until(refusal, "b is unschedulable")
    assert answer(first["status"]["podIP"], "/v1/models").count('"a"')

    scale(own.kubectl, namespace, "a", 0)
    second = ready_pod(own.kubectl, namespace, "b")

    assert answer(second["status"]["podIP"], "/v1/models").count('"b"')
    assert pods_of(own.kubectl, namespace, "a") == []
    assert second["status"]["podIP"] != first["status"]["podIP"]


def test_the_grace_is_honoured_then_the_process_is_killed(own: OwnCluster, namespace: str) -> None:
    stubborn = container("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done")
    own.kubectl.apply(pod(namespace, "p", stubborn, terminationGracePeriodSeconds=3))
    until(lambda: phase_of(own.kubectl, namespace, "p") == "Running", "it runs")

    begun = time.monotonic()
    own.kubectl("delete", "pod", "p", "-n", namespace, "--wait=true")
    took = time.monotonic() - begun

    assert 2.5 < took < 20
    assert own.nodes["gpu-0"].container_pids() == []


def test_term_lets_a_container_end_by_itself_and_pre_stop_comes_first(
    own: OwnCluster, namespace: str
) -> None:
    at_term = "echo term >> $HOME/story; cat $HOME/story; exit 0"
    script = f"trap '{at_term}' TERM; while :; do sleep 0.05; done"
    hook = {"exec": {"command": ["sh", "-c", "echo hook >> $HOME/story"]}}
    polite = container("sh", "-c", script, lifecycle={"preStop": hook})
    held = {"finalizers": ["modelpool.test/look"]}
    wanted = pod(namespace, "p", polite)
    own.kubectl.apply({**wanted, "metadata": {**wanted["metadata"], **held}})
    until(lambda: phase_of(own.kubectl, namespace, "p") == "Running", "it runs")

    own.kubectl("delete", "pod", "p", "-n", namespace, "--wait=false")
    ended = terminated(own.kubectl, namespace, "p")
    story = own.kubectl("logs", "p", "-n", namespace)
    phase = phase_of(own.kubectl, namespace, "p")
    nothing = '{"metadata":{"finalizers":null}}'
    own.kubectl("patch", "pod", "p", "-n", namespace, "--type=merge", "-p", nothing)

    assert (ended["exitCode"], ended["reason"], phase) == (0, "Completed", "Succeeded")
    assert story.split() == ["hook", "term"]


def test_the_exit_code_and_the_log_of_a_failed_container_are_shown(
    own: OwnCluster, namespace: str
) -> None:
    failing = container("sh", "-c", "echo out of luck; exit 7")
    failing["terminationMessagePolicy"] = "FallbackToLogsOnError"
    own.kubectl.apply(pod(namespace, "p", failing))

    ended = terminated(own.kubectl, namespace, "p")

    assert (ended["exitCode"], ended["reason"]) == (7, "Error")
    assert ended["message"] == "out of luck\n"
    assert own.kubectl("logs", "p", "-n", namespace) == "out of luck\n"
    assert phase_of(own.kubectl, namespace, "p") == "Failed"


def test_a_crash_loop_backs_off_and_counts(own: OwnCluster, namespace: str) -> None:
    own.kubectl.apply(pod(namespace, "p", container("sh", "-c", "exit 3"), restartPolicy="Always"))

    waits_for(own.kubectl, namespace, "p", "CrashLoopBackOff")
    status = status_of(own.kubectl, namespace, "p")

    assert status["restartCount"] >= 2
    assert status["lastState"]["terminated"]["exitCode"] == 3
    assert phase_of(own.kubectl, namespace, "p") == "Running"


def test_an_absent_image_is_pulled_in_vain_and_a_bad_command_cannot_start(
    own: OwnCluster, namespace: str
) -> None:
    absent = container("true", image="modelpool.test/absent:1")
    own.kubectl.apply(pod(namespace, "p", absent))
    own.kubectl.apply(pod(namespace, "q", container("/no/such/program")))
    own.kubectl.apply(pod(namespace, "r", container("true", image="Not An Image")))

    assert "not found" in waits_for(own.kubectl, namespace, "p", "ImagePullBackOff")["message"]
    assert terminated(own.kubectl, namespace, "q")["reason"] == "StartError"
    waits_for(own.kubectl, namespace, "r", "InvalidImageName")
    assert phase_of(own.kubectl, namespace, "p") == "Pending"


def test_memory_can_run_out_and_a_pod_can_be_evicted(own: OwnCluster, namespace: str) -> None:
    for name in ("p", "q"):
        own.kubectl.apply(pod(namespace, name, container("sleep", "1000")))
        until(lambda name=name: phase_of(own.kubectl, namespace, name) == "Running", "it runs")  # type: ignore[misc]

    notes = ("-n", namespace, "--overwrite")
    own.kubectl("annotate", "pod", "p", *notes, "kubelet.modelpool.test/oom=1")
    own.kubectl("annotate", "pod", "q", *notes, "kubelet.modelpool.test/evict=The node was low.")

    ended = terminated(own.kubectl, namespace, "p")
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    until(lambda: phase_of(own.kubectl, namespace, "q") == "Failed", "q is evicted")
    left = own.kubectl.get("pod", "q", "-n", namespace)["status"]
    assert (left["reason"], left["message"]) == ("Evicted", "The node was low.")
    assert "terminated" in left["containerStatuses"][0]["state"]


def test_a_force_deleted_pod_still_holds_the_gpu_until_its_process_is_gone(
    own: OwnCluster, namespace: str
) -> None:
    stubborn = container("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
    stubborn["resources"] = {"limits": {GPU: "1"}}
    own.kubectl.apply(pod(namespace, "p", stubborn))
    until(lambda: phase_of(own.kubectl, namespace, "p") == "Running", "it runs")

    # The node hears of both at once: the process of p cannot be gone when q is admitted.
    own.nodes["gpu-0"].lose()
    own.kubectl("delete", "pod", "p", "-n", namespace, "--force", "--grace-period=0")
    eager = container("sleep", "1000", resources={"limits": {GPU: "1"}})
    own.kubectl.apply(pod(namespace, "q", eager))
    bound = "jsonpath={.spec.nodeName}"
    until(lambda: own.kubectl("get", "pod", "q", "-n", namespace, "-o", bound), "q is bound")
    own.nodes["gpu-0"].come_back()
    until(lambda: phase_of(own.kubectl, namespace, "q") == "Failed", "q is refused by the node")

    left = own.kubectl.get("pod", "q", "-n", namespace)["status"]
    assert left["reason"] == "UnexpectedAdmissionError"
    assert "Requested: 1, Available: 0" in left["message"]
    assert "containerStatuses" not in left


def test_a_failing_liveness_probe_restarts_and_readiness_follows_the_answer(
    own: OwnCluster, namespace: str
) -> None:
    sick = {
        "exec": {"command": ["test", "-e", "/nowhere"]},
        "periodSeconds": 1,
        "failureThreshold": 2,
    }
    one = container("sleep", "1000", livenessProbe=sick)
    ready = container("sleep", "1000", readinessProbe={"exec": {"command": ["true"]}})
    unready = container("sleep", "1000", readinessProbe={"tcpSocket": {"port": 9}})
    own.kubectl.apply(
        pod(namespace, "p", one, restartPolicy="Always", terminationGracePeriodSeconds=1),
        pod(namespace, "q", ready),
        pod(namespace, "r", unready),
    )

    until(lambda: status_of(own.kubectl, namespace, "p").get("restartCount", 0) > 0, "a restart")
    until(lambda: is_ready(own.kubectl.get("pod", "q", "-n", namespace)), "q is ready")
    assert not is_ready(own.kubectl.get("pod", "r", "-n", namespace))


def test_init_containers_environment_and_volumes_reach_the_process(
    own: OwnCluster, namespace: str
) -> None:
    settings = {"kind": "ConfigMap", "apiVersion": "v1", "data": {"greeting": "hello"}}
    settings["metadata"] = {"name": "settings", "namespace": namespace}
    show = "cat /spare/made /etc/settings/greeting; echo; echo $WHO $(cat $TOKEN | wc -c)"
    mounts = [
        {"name": "spare", "mountPath": "/spare"},
        {"name": "settings", "mountPath": "/etc/settings"},
    ]
    token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    env = [
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {
            "name": "GREETING",
            "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "greeting"}},
        },
        {"name": "WHO", "value": "$(GREETING)-$(NAME)-$$(NAME)"},
        {"name": "TOKEN", "value": token},
    ]
    volumes = [
        {"name": "spare", "emptyDir": {}},
        {"name": "settings", "configMap": {"name": "settings"}},
    ]
    init = {**container("sh", "-c", "echo made > /spare/made", volumeMounts=mounts), "name": "init"}
    main = container("sh", "-c", show, env=env, volumeMounts=mounts)
    own.kubectl.apply(settings, pod(namespace, "p", main, initContainers=[init], volumes=volumes))

    until(lambda: phase_of(own.kubectl, namespace, "p") == "Succeeded", "it is done")
    made, greeting, who = own.kubectl("logs", "p", "-n", namespace).splitlines()

    assert (made, greeting) == ("made", "hello")
    assert who.split()[0] == "hello-p-$(NAME)"
    assert int(who.split()[1]) > 100


def test_a_pods_own_account_reaches_the_api_server(own: OwnCluster, namespace: str) -> None:
    kubectl = str(own.assets / "bin" / "kubectl")
    asks = container(kubectl, "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")
    own.kubectl.apply(pod(namespace, "p", asks))

    until(lambda: phase_of(own.kubectl, namespace, "p") == "Succeeded", "it is done")

    said = own.kubectl("logs", "p", "-n", namespace)
    assert said == f"system:serviceaccount:{namespace}:default"


# -- nodes ----------------------------------------------------------------------------------------


def test_a_lost_node_keeps_its_pod_terminating_until_it_is_tainted_out_of_service(
    own: OwnCluster, namespace: str
) -> None:
    node = own.node("gpu-lost")
    one = container("sleep", "1000", resources={"limits": {GPU: "1"}})
    place = {"kubernetes.io/hostname": "gpu-lost"}
    own.kubectl.apply(pod(namespace, "p", one, nodeSelector=place, terminationGracePeriodSeconds=1))
    until(lambda: phase_of(own.kubectl, namespace, "p") == "Running", "it runs")

    node.lose()
    own.kubectl("wait", "--for=condition=Ready=Unknown", "node/gpu-lost", "--timeout=60s")
    own.kubectl("delete", "pod", "p", "-n", namespace, "--wait=false")
    with pytest.raises(KubectlFailed, match="timed out"):
        own.kubectl("wait", "--for=delete", "pod/p", "-n", namespace, "--timeout=4s")
    assert len(node.container_pids()) == 1  # it may well be running still

    taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    own.kubectl("taint", "node", "gpu-lost", taint)
    until(lambda: not own.kubectl.get("pod", "p", "-n", namespace), "the Pod is gone", 60)
    own.remove_node("gpu-lost")
    assert node.container_pids() == []


def test_a_node_that_comes_back_is_ready_and_its_pod_was_never_touched(
    own: OwnCluster, namespace: str
) -> None:
    node = own.node("gpu-back")
    place = {"kubernetes.io/hostname": "gpu-back"}
    own.kubectl.apply(pod(namespace, "p", container("sleep", "1000"), nodeSelector=place))
    until(lambda: phase_of(own.kubectl, namespace, "p") == "Running", "it runs")
    pids = node.container_pids()

    node.lose()
    own.kubectl("wait", "--for=condition=Ready=Unknown", "node/gpu-back", "--timeout=60s")
    node.come_back()
    node.wait_ready()

    until(lambda: is_ready(own.kubectl.get("pod", "p", "-n", namespace)), "p is Ready again")
    assert node.container_pids() == pids
    own.remove_node("gpu-back")


# -- Kueue ----------------------------------------------------------------------------------------


def test_a_pod_group_is_admitted_under_quota_and_the_next_one_queues(
    own: OwnCluster, namespace: str
) -> None:
    kubectl, queue = own.kubectl, namespace
    kubectl.apply(*queues(namespace, queue, gpus=1))
    wants = container("sleep", "1000", resources={"limits": {GPU: "1"}})

    def workload(group: str) -> dict[str, str]:
        found = kubectl.get("workloads.kueue.x-k8s.io", group, "-n", namespace)
        conditions = (found.get("status") or {}).get("conditions") or []
        return {one["type"]: one["status"] for one in conditions}

    try:
        first = pod(namespace, "a-0", wants, terminationGracePeriodSeconds=1)
        kubectl.create(grouped(first, group="a", queue=queue, total=1))
        until(lambda: workload("a").get("Admitted") == "True", "a is admitted")
        until(lambda: phase_of(kubectl, namespace, "a-0") == "Running", "a runs")
        second = pod(namespace, "b-0", wants, terminationGracePeriodSeconds=1)
        kubectl.create(grouped(second, group="b", queue=queue, total=1))
        until(lambda: workload("b").get("QuotaReserved") == "False", "b waits for quota")

        gates = kubectl.get("pod", "b-0", "-n", namespace)["spec"]["schedulingGates"]
        kubectl("delete", "workload", "a", "-n", namespace, "--wait=false")

        until(lambda: workload("b").get("Admitted") == "True", "b is admitted")
        until(lambda: phase_of(kubectl, namespace, "b-0") == "Running", "b runs")
        assert {"name": "kueue.x-k8s.io/admission"} in gates
        assert kubectl.get("pod", "a-0", "-n", namespace) == {}
    finally:
        kubectl("delete", "workloads", "--all", "-n", namespace)
        kubectl("delete", "localqueue", queue, "-n", namespace)
        kubectl("delete", "clusterqueue", queue)
        kubectl("delete", "resourceflavor", queue)
