"""The kinds of `modelpool.dev/v1alpha1`, one module each."""

from .inferenceservice import InferenceService, InferenceServiceSpec, InferenceServiceStatus
from .instancetype import InstanceType, InstanceTypeSpec, InstanceTypeStatus
from .modeldeployment import ModelDeployment, ModelDeploymentSpec, ModelDeploymentStatus
from .modelpool import ModelPool, ModelPoolSpec, ModelPoolStatus
from .modelrouter import ModelRouter, ModelRouterSpec, ModelRouterStatus

__all__ = [
    "InferenceService",
    "InferenceServiceSpec",
    "InferenceServiceStatus",
    "InstanceType",
    "InstanceTypeSpec",
    "InstanceTypeStatus",
    "ModelDeployment",
    "ModelDeploymentSpec",
    "ModelDeploymentStatus",
    "ModelPool",
    "ModelPoolSpec",
    "ModelPoolStatus",
    "ModelRouter",
    "ModelRouterSpec",
    "ModelRouterStatus",
]
