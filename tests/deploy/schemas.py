"""Schemas of kinds that Kubernetes does not define, and of compose files, written from their published fields.

They name the fields that a file may have at each place, with their types; a field that is misspelt or misplaced is
refused. Fields whose content is Kubernetes' own (containers, volumes) are open here: the tests hold them against
Kubernetes' schemas.

Sources, read in August 2026:
ServingRuntime, InferenceService: github.com/kserve/kserve, config/crd/full/serving.kserve.io_*.yaml at aaac4e2.
ServiceMonitor: github.com/prometheus-operator/prometheus-operator,
example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml at 6adcebc.
Kustomization, Component: kubectl.docs.kubernetes.io/references/kustomize/kustomization.
Compose files: github.com/compose-spec/compose-spec/blob/main/spec.md.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
OBJECT: Schema = {"type": "object"}
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer"}
TEXT_MAP: Schema = {"type": "object", "additionalProperties": TEXT}
DURATION: Schema = {"type": "string", "pattern": r"^(\d+(ms|s|m|h))+$"}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}


def fields(required: str = "", **known: Schema) -> Schema:
    """An object with these fields and no others; `required` names those that have to be there."""
    return {"type": "object", "properties": known, "required": required.split(), "additionalProperties": False}


def listed(item: Schema) -> Schema:
    """An array of such items, of which there is one at least."""
    return {"type": "array", "items": item, "minItems": 1}


def of_type(schema: Schema, names: str) -> dict[str, Schema]:
    """Fields that have the same schema."""
    return dict.fromkeys(names.split(), schema)


def kind(api_version: str, name: str, spec: Schema) -> Schema:
    """A resource of Kubernetes with a name and a `spec`."""
    metadata = fields("name", name=NAME, namespace=NAME, labels=TEXT_MAP, annotations=TEXT_MAP)
    return fields(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": name},
        metadata=metadata,
        spec=spec,
    )


SERVING_RUNTIME = kind(
    "serving.kserve.io/v1alpha1",
    "ServingRuntime",
    fields(
        "containers",
        containers=listed({**OBJECT, "required": ["name"]}),
        volumes=listed({**OBJECT, "required": ["name"]}),
        supportedModelFormats=listed(fields("name", name=TEXT, version=TEXT, autoSelect=FLAG, priority=COUNT)),
        protocolVersions=listed(TEXT),
        annotations=TEXT_MAP,
        labels=TEXT_MAP,
        nodeSelector=TEXT_MAP,
        imagePullSecrets=listed(fields(name=TEXT)),
        tolerations=listed(OBJECT),
        resourceClaims=listed(OBJECT),
        replicas=COUNT,
        **of_type(FLAG, "multiModel disabled hostIPC"),
        **of_type(TEXT, "grpcEndpoint grpcDataEndpoint httpDataEndpoint schedulerName"),
        **of_type(OBJECT, "affinity builtInAdapter storageHelper workerSpec"),
    ),
)
_MODEL = fields(
    "modelFormat",
    modelFormat=fields("name", name=TEXT, version=TEXT),
    storage=fields(key=TEXT, path=TEXT, schemaPath=TEXT, parameters=TEXT_MAP),
    **of_type(TEXT, "name runtime runtimeVersion protocolVersion storageUri image imagePullPolicy workingDir"),
    **of_type(listed(TEXT), "args command"),
    **of_type(listed(OBJECT), "env envFrom ports volumeMounts"),
    **of_type(OBJECT, "resources securityContext livenessProbe readinessProbe startupProbe lifecycle"),
)
INFERENCE_SERVICE = kind(
    "serving.kserve.io/v1beta1",
    "InferenceService",
    fields(
        "predictor",
        predictor=fields(
            model=_MODEL,
            labels=TEXT_MAP,
            annotations=TEXT_MAP,
            nodeSelector=TEXT_MAP,
            scaleMetric={"enum": ["cpu", "memory", "concurrency", "rps"]},
            **of_type(COUNT, "minReplicas maxReplicas scaleTarget containerConcurrency canaryTrafficPercent timeout"),
            **of_type(COUNT, "terminationGracePeriodSeconds activeDeadlineSeconds"),
            **of_type(TEXT, "serviceAccountName runtimeClassName priorityClassName schedulerName"),
            **of_type(listed(OBJECT), "containers initContainers volumes tolerations imagePullSecrets"),
            **of_type(OBJECT, "affinity securityContext batcher logger workerSpec deploymentStrategy"),
        ),
        transformer=OBJECT,
        explainer=OBJECT,
    ),
)
_SECRET_KEY = fields("key", name=TEXT, key=TEXT, optional=FLAG)
_SELECTOR = fields(matchLabels=TEXT_MAP, matchExpressions=listed(OBJECT))
_ENDPOINT = fields(
    port=TEXT,
    targetPort={"type": ["integer", "string"]},
    path=TEXT,
    scheme={"enum": ["http", "https", "HTTP", "HTTPS"]},
    interval=DURATION,
    scrapeTimeout=DURATION,
    authorization=fields(type=TEXT, credentials=_SECRET_KEY),
    bearerTokenSecret=_SECRET_KEY,
    params={"type": "object", "additionalProperties": listed(TEXT)},
    **of_type(FLAG, "honorLabels honorTimestamps followRedirects enableHttp2 filterRunning trackTimestampsStaleness"),
    **of_type(TEXT, "bearerTokenFile proxyUrl noProxy"),
    **of_type(listed(OBJECT), "relabelings metricRelabelings"),
    **of_type(OBJECT, "basicAuth oauth2 tlsConfig"),
)
SERVICE_MONITOR = kind(
    "monitoring.coreos.com/v1",
    "ServiceMonitor",
    fields(
        "endpoints selector",
        endpoints=listed(_ENDPOINT),
        selector=_SELECTOR,
        namespaceSelector=fields(any=FLAG, matchNames=listed(TEXT)),
        jobLabel=TEXT,
        scrapeClass=TEXT,
        attachMetadata=OBJECT,
        **of_type(listed(TEXT), "targetLabels podTargetLabels scrapeProtocols"),
        **of_type(COUNT, "sampleLimit targetLimit labelLimit labelNameLengthLimit labelValueLengthLimit"),
    ),
)
_PATCH = fields("patch", patch=TEXT, path=TEXT, target=fields(**of_type(TEXT, "group version kind name namespace")))
_LABELS = fields("pairs", pairs=TEXT_MAP, includeSelectors=FLAG, includeTemplates=FLAG)
_IMAGE = fields("name", **of_type(TEXT, "name newName newTag digest"))


def _kustomization(api_version: str, name: str) -> Schema:
    return fields(
        "apiVersion kind resources",
        apiVersion={"const": api_version},
        kind={"const": name},
        labels=listed(_LABELS),
        images=listed(_IMAGE),
        patches=listed(_PATCH),
        **of_type(TEXT, "namespace namePrefix nameSuffix"),
        **of_type(listed(TEXT), "resources components"),
        **of_type(listed(OBJECT), "configMapGenerator secretGenerator replicas"),
    )


KUSTOMIZATION = _kustomization("kustomize.config.k8s.io/v1beta1", "Kustomization")
COMPONENT = _kustomization("kustomize.config.k8s.io/v1alpha1", "Component")
KINDS: dict[str, Schema] = {
    schema["properties"]["kind"]["const"]: schema
    for schema in (SERVING_RUNTIME, INFERENCE_SERVICE, SERVICE_MONITOR, KUSTOMIZATION, COMPONENT)
}
"""Kind -> its schema."""

_DEVICE = fields("capabilities", driver=TEXT, count={"type": ["integer", "string"]}, capabilities=listed(TEXT))
_SERVICE = fields(
    profiles=listed(TEXT),
    image=TEXT,
    build=fields("context", context=TEXT, dockerfile=TEXT, args=TEXT_MAP, target=TEXT),
    environment=TEXT_MAP,
    networks={"type": "object", "additionalProperties": fields(aliases=listed(TEXT))},
    restart={"enum": ["no", "always", "on-failure", "unless-stopped"]},
    stop_grace_period=DURATION,
    read_only=FLAG,
    init=FLAG,
    deploy=fields(resources=fields(reservations=fields(devices=listed(_DEVICE)), limits=OBJECT)),
    healthcheck=OBJECT,
    user=TEXT,
    **of_type(
        listed(TEXT), "command entrypoint volumes ports tmpfs cap_drop security_opt depends_on group_add devices"
    ),
)
COMPOSE: Schema = {
    **fields(
        "services",
        name=NAME,
        services={"type": "object", "additionalProperties": _SERVICE},
        volumes={"type": "object", "additionalProperties": fields(name=TEXT, external=FLAG, driver=TEXT)},
        networks=OBJECT,
    ),
    "patternProperties": {"^x-": {}},
}
