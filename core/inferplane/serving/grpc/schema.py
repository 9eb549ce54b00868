"""The messages of `inference.GRPCInferenceService`, as far as this server reads and writes them.

Fields are declared here, not generated, in a descriptor pool of their own: no compiler's output has to be kept in step
with the runtime, and there is no clash with a client library that registers messages of the same names in this process.

Sources for names, numbers and types: KServe's open inference protocol,
https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_grpc.md, and Triton's
extensions to it, https://github.com/triton-inference-server/common/blob/main/protobuf/grpc_service.proto.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
FILE = "inferplane/inference.proto"

# `ModelInferRequestHead` is no message of the protocol: it reads what a refusal of a `ModelInferRequest` repeats.
# Message -> "number name type", separated by semicolons. `[]` repeats, `{}` is a map from strings, `|` joins a oneof.
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 live bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 ready bool",
    "ModelReadyRequest": "1 name string; 2 version string",
    "ModelReadyResponse": "1 ready bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 name string; 2 version string; 3 extensions string[]",
    "ModelMetadataRequest": "1 name string; 2 version string",
    "ModelMetadataResponse": "1 name string; 2 versions string[]; 3 platform string; 4 inputs .TensorMetadata[]; "
    "5 outputs .TensorMetadata[]",
    "ModelMetadataResponse.TensorMetadata": "1 name string; 2 datatype string; 3 shape int64[]",
    "InferParameter": "1 bool_param bool|; 2 int64_param int64|; 3 string_param string|; 4 double_param double|; "
    "5 uint64_param uint64|",
    "InferTensorContents": "1 bool_contents bool[]; 2 int_contents int32[]; 3 int64_contents int64[]; "
    "4 uint_contents uint32[]; 5 uint64_contents uint64[]; 6 fp32_contents float[]; 7 fp64_contents double[]; "
    "8 bytes_contents bytes[]",
    "ModelInferRequest": "1 model_name string; 2 model_version string; 3 id string; 4 parameters InferParameter{}; "
    "5 inputs .InferInputTensor[]; 6 outputs .InferRequestedOutputTensor[]; 7 raw_input_contents bytes[]",
    "ModelInferRequestHead": "1 model_name string; 3 id string",
    "ModelInferRequest.InferInputTensor": "1 name string; 2 datatype string; 3 shape int64[]; "
    "4 parameters InferParameter{}; 5 contents InferTensorContents",
    "ModelInferRequest.InferRequestedOutputTensor": "1 name string; 2 parameters InferParameter{}",
    "ModelInferResponse": "1 model_name string; 2 model_version string; 3 id string; 4 parameters InferParameter{}; "
    "5 outputs .InferOutputTensor[]; 6 raw_output_contents bytes[]",
    "ModelInferResponse.InferOutputTensor": "1 name string; 2 datatype string; 3 shape int64[]; "
    "4 parameters InferParameter{}; 5 contents InferTensorContents",
    "ModelStreamInferResponse": "1 error_message string; 2 infer_response ModelInferResponse",
    "ModelConfigRequest": "1 name string; 2 version string",
    "ModelConfigResponse": "1 config ModelConfig",
    "ModelConfig": "1 name string; 2 platform string; 4 max_batch_size int32; 5 input ModelInput[]; "
    "6 output ModelOutput[]; 14 parameters ModelParameter{}; 17 backend string; "
    "19 model_transaction_policy ModelTransactionPolicy",
    "ModelInput": "1 name string; 2 data_type DataType; 4 dims int64[]; 8 optional bool",
    "ModelOutput": "1 name string; 2 data_type DataType; 3 dims int64[]",
    "ModelParameter": "1 string_value string",
    "ModelTransactionPolicy": "1 decoupled bool",
    "ModelStatisticsRequest": "1 name string; 2 version string",
    "ModelStatisticsResponse": "1 model_stats ModelStatistics[]",
    "ModelStatistics": "1 name string; 2 version string; 3 last_inference uint64; 4 inference_count uint64; "
    "5 execution_count uint64; 6 inference_stats InferStatistics",
    "InferStatistics": "1 success StatisticDuration; 2 fail StatisticDuration; 3 queue StatisticDuration; "
    "5 compute_infer StatisticDuration",
    "StatisticDuration": "1 count uint64; 2 ns uint64",
    "RepositoryIndexRequest": "1 repository_name string; 2 ready bool",
    "RepositoryIndexResponse": "1 models .ModelIndex[]",
    "RepositoryIndexResponse.ModelIndex": "1 name string; 2 version string; 3 state string; 4 reason string",
}
_DATA_TYPES = (
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
)
METHODS = (
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer"),
    *("ModelConfig", "ModelStatistics", "RepositoryIndex"),
)
"""The implemented methods. Triton's others (loading models, shared memory, traces) are UNIMPLEMENTED."""
STREAMS = frozenset(("ModelStreamInfer",))

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind == "DataType" else _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


def _declare(message: Any, path: str, text: str) -> None:
    """Add fields to a message."""
    for number, name, kind, form in re.findall(r"(\d+) (\w+) ([.\w]+)(\[\]|\{\}|\|)?", text):
        field = message.field.add(name=name, number=int(number))
        field.label = _Field.LABEL_REPEATED if form in ("[]", "{}") else _Field.LABEL_OPTIONAL
        kind = f"{path}{kind}" if kind.startswith(".") else kind
        if form == "{}":
            entry = message.nested_type.add(name="".join(w.title() for w in name.split("_")) + "Entry")
            entry.options.map_entry = True
            _declare(entry, "", f"1 key string; 2 value {kind}")
            kind = f"{path}.{entry.name}"
        if form == "|":
            if not message.oneof_decl:
                message.oneof_decl.add(name="parameter_choice")
            field.oneof_index = 0
        _set_type(field, kind)


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=FILE, package=PACKAGE, syntax="proto3")
    made: dict[str, Any] = {}
    for path, text in _MESSAGES.items():
        outer, _, name = path.rpartition(".")
        made[path] = made[outer].nested_type.add(name=name) if outer else file.message_type.add(name=name)
        _declare(made[path], path, text)
    kinds = file.enum_type.add(name="DataType")
    for number, name in enumerate(_DATA_TYPES):
        kinds.value.add(name=f"TYPE_{name}", number=number)
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for name in METHODS:
        request, response = ("ModelInfer", "ModelStreamInfer") if name in STREAMS else (name, name)
        service.method.add(
            name=name,
            input_type=f".{PACKAGE}.{request}Request",
            output_type=f".{PACKAGE}.{response}Response",
            client_streaming=name in STREAMS,
            server_streaming=name in STREAMS,
        )
    return file


POOL = descriptor_pool.DescriptorPool()
POOL.AddSerializedFile(_file().SerializeToString())


def message(name: str) -> Any:
    """Return the class of a message, by its name without the package."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def method_types(name: str) -> tuple[Any, Any]:
    """Return the classes of a method's requests and responses."""
    method = POOL.FindServiceByName(SERVICE).FindMethodByName(name)
    return tuple(message_factory.GetMessageClass(d) for d in (method.input_type, method.output_type))
