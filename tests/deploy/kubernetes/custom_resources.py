"""Minimal CustomResourceDefinitions of the APIs that k8s/ uses beyond Kubernetes' own.

Written from their documentation (Prometheus operator, KEDA, Gateway API, its Inference Extension, LeaderWorkerSet):
the fields that k8s/ names, with their types. An API server that has them refuses what they lack.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
STRINGS = {"type": "object", "additionalProperties": STRING}
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def enum(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def fields(required: str = "", **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties} | ({"required": required.split()} if required else {})


def items(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


_LABEL_SELECTOR = fields(matchLabels=STRINGS)
_HTTP_ROUTE = fields(
    parentRefs=items(fields("name", name=STRING, namespace=STRING, group=STRING, kind=STRING, sectionName=STRING)),
    hostnames=items(STRING),
    rules=items(
        fields(
            matches=items(fields(path=fields(type=enum("Exact", "PathPrefix", "RegularExpression"), value=STRING))),
            timeouts=fields(request=STRING, backendRequest=STRING),
            backendRefs=items(fields("name", group=STRING, kind=STRING, name=STRING, port=INTEGER, weight=INTEGER)),
        )
    ),
)
_SCALED_OBJECT = fields(
    "scaleTargetRef triggers",
    scaleTargetRef=fields("name", apiVersion=STRING, kind=STRING, name=STRING),
    minReplicaCount=INTEGER,
    maxReplicaCount=INTEGER,
    pollingInterval=INTEGER,
    cooldownPeriod=INTEGER,
    fallback=fields("failureThreshold replicas", failureThreshold=INTEGER, replicas=INTEGER),
    advanced=fields(horizontalPodAutoscalerConfig=fields(name=STRING, behavior=ANYTHING)),
    triggers=items(
        fields(
            "type metadata", type=STRING, metricType=enum("AverageValue", "Value", "Utilization"), metadata=STRINGS
        )
    ),
)
_LEADER_WORKER_SET = fields(
    "leaderWorkerTemplate",
    replicas=INTEGER,
    startupPolicy=enum("LeaderCreated", "LeaderReady"),
    rolloutStrategy=fields(
        "type",
        type=enum("RollingUpdate"),
        rollingUpdateConfiguration=fields(maxUnavailable=INTEGER, maxSurge=INTEGER, partition=INTEGER),
    ),
    leaderWorkerTemplate=fields(
        "workerTemplate",
        size=INTEGER,
        restartPolicy=enum("RecreateGroupOnPodRestart", "None"),
        leaderTemplate=ANYTHING,
        workerTemplate=ANYTHING,
    ),
)
SPECS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): fields(
        "selector podMetricsEndpoints",
        selector=_LABEL_SELECTOR,
        jobLabel=STRING,
        podMetricsEndpoints=items(fields(port=STRING, interval=STRING, path=STRING)),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _HTTP_ROUTE,
    ("inference.networking.k8s.io/v1", "InferencePool"): fields(
        "selector targetPorts endpointPickerRef",
        selector=fields("matchLabels", matchLabels=STRINGS),
        targetPorts=items(fields("number", number=INTEGER)),
        endpointPickerRef=fields(
            "name",
            group=STRING,
            kind=STRING,
            name=STRING,
            port=fields("number", number=INTEGER),
            failureMode=enum("FailOpen", "FailClose"),
        ),
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _LEADER_WORKER_SET,
}


def definitions() -> list[dict[str, Any]]:
    """Return all definitions, for an API server."""
    return [_definition(api_version, kind, spec) for (api_version, kind), spec in SPECS.items()]


def _definition(api_version: str, kind: str, spec: Schema) -> dict[str, Any]:
    group, version = api_version.split("/")
    plural = f"{kind.lower()}s"
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": fields("spec", spec=spec)},
    }
    approval = {"api-approved.kubernetes.io": "unapproved, for a test"} if group.endswith(".k8s.io") else {}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": approval},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()},
            "versions": [served],
        },
    }
