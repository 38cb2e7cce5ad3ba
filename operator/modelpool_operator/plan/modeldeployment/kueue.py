"""Words of Kueue that we write or read, spelled as Kueue spells them."""

from __future__ import annotations

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
TOTAL_ANNOTATION = "kueue.x-k8s.io/pod-group-total-count"
ROLE_HASH_ANNOTATION = "kueue.x-k8s.io/role-hash"
"""Name of the PodSet that a member belongs to; we write the role there."""
SERVING_ANNOTATION = "kueue.x-k8s.io/pod-group-serving"
"""The group never finishes."""
TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-required-topology"
ADMISSION_GATE = "kueue.x-k8s.io/admission"
"""Scheduling gate that Kueue's webhook puts on a Pod and takes off when it is admitted."""

ADMITTED = "Admitted"
QUOTA_RESERVED = "QuotaReserved"
EVICTED = "Evicted"
PREEMPTED = "Preempted"
REQUEUED = "Requeued"
FINISHED = "Finished"
PODS_READY = "PodsReady"
WAIT_FOR_RECOVERY = "WaitForRecovery"
