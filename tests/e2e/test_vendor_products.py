"""Each vendor's own products with quantized weights are bound by checkpoints and by `quantization`, on plans alone."""

import pytest

from inferplane.conformance.configs import SLICES
from inferplane.engine import ModelFiles, Runner, RunnerOptions
from inferplane.engine.runner.loading.slow_ops import describe_slow_ops
from inferplane.errors import BindError
from inferplane.models import Config
from inferplane.models.reading.shipped_configs import read_shipped_config
from inferplane.plugins import discover

LLAMA = {**SLICES["llama_8b_two_layers"], "num_hidden_layers": 32, "vocab_size": 128256}
V3 = SLICES["deepseek_v3_two_layers"]
HOST = discover("only,inferplane_cpu.plugin,inferplane_cuda.plugin,inferplane_dcu.plugin,inferplane_gcu.plugin,"
                "inferplane_npu.plugin,inferplane_xpu.plugin")  # fmt: skip


def compressed(kind: str, bits: int = 8, **inputs):
    """compressed-tensors' config of linear layers with a scale a row, and activations with a scale a token."""
    weights = {"type": kind, "num_bits": bits, "strategy": "channel", "symmetric": True, "dynamic": False}
    activations = {"type": kind, "num_bits": bits, "strategy": "token", "symmetric": True, "dynamic": True, **inputs}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int" else "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def plan(device, config=LLAMA, stored=None, **options):
    entries = dict(config) if stored is None else {**config, "quantization_config": stored}
    named = RunnerOptions(dtype="bfloat16", load_format="dummy", **options)
    return Runner.plan_only(ModelFiles(Config(entries, "model")), HOST, device, named)


def chosen(runner, op="linear"):
    """The kernels of the layers' ops of one name."""
    return {
        choice.label
        for kind in runner.plan.choices
        for site, found, choice in runner.plan.sites(kind)
        if found.name == op and (op != "linear" or found.weight.format != "plain")
    }


@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        ("dcu", "lightop:linear_w8a8"),
        ("npu", "torch_npu:linear_w8a8"),
        ("xpu:kunlun", "kunlun_ops:linear_w8a8"),
        ("cpu", "native:linear_w8a8"),
    ],
)
@pytest.mark.parametrize("options", [{"stored": compressed("int")}, {"quantization": "a8w8"}], ids=["stored", "online"])
def test_w8a8(device, kernel, options):
    ops = {} if device != "cpu" else {"ops": {"decoder_layer": "decomposition", "decoder_stack": "decomposition"}}
    runner = plan(device, **options, **ops)
    assert chosen(runner) == {kernel}
    dequantized = {op for op, _ in runner.plan.dequantized}
    assert not dequantized and not runner.plan.expanded_bytes


@pytest.mark.parametrize(
    "options", [{"stored": compressed("float")}, {"quantization": "a8w8_fp8"}], ids=["stored", "online"]
)
def test_fp8_on_the_950(options):
    runner = plan("npu", arch="950", **options)
    assert chosen(runner) == {"torch_npu:linear_fp8"} and not runner.plan.dequantized
    assert plan("npu", arch="910b", **options).plan.dequantized, "the 910b has no FP8"


def test_activations_that_are_not_to_be_quantized_are_not():
    """The same weights without a request: the product with plain activations, or none."""
    stored = compressed("int")
    stored["config_groups"]["group_0"]["input_activations"] = None
    assert chosen(plan("npu", stored=stored)) == {"torch_npu:linear_w8a16"}
    assert not chosen(plan("dcu", stored=stored)) & {"lightop:linear_w8a8"}
    assert plan("dcu", stored=stored).plan.dequantized


@pytest.mark.parametrize("device", ["npu", "gcu", "xpu:intel", "cpu", "cuda"])
def test_int8_halves_the_bytes(device):
    """On every device whose vendor multiplies plain activations by int8; the embedding stays in 16 bits."""
    plain, int8 = (plan(device, quantization=name).plan.weight_bytes for name in (None, "weight_only_int8"))
    assert int8 <= 0.55 * plain


@pytest.mark.parametrize(
    ("device", "scheme", "kernel"),
    [
        ("npu", "weight_only_int8", "torch_npu:moe_experts_int8"),
        ("npu", "weight_only_int4", "torch_npu:moe_experts_int4"),
        ("npu", "a8w8", "torch_npu:moe_experts_w8a8"),
        ("gcu", "weight_only_int8", "vllm_gcu:moe_experts_w8a16"),
        ("gcu", "weight_only_int4", "vllm_gcu:moe_experts_w4a16"),
        ("xpu:intel", "weight_only_int4", "vllm_xpu:moe_experts_int4"),
        ("xpu:kunlun", "a8w8", "kunlun_ops:moe_experts_w8a8"),
    ],
)
def test_experts(device, scheme, kernel):
    runner = plan(device, V3, quantization=scheme)
    assert chosen(runner, "moe_experts") == {kernel} and not runner.plan.dequantized


def test_experts_in_fp8_on_the_950():
    runner = plan("npu", V3, quantization="a8w8_fp8", arch="950")
    assert chosen(runner, "moe_experts") == {"torch_npu:moe_experts_fp8"} and not runner.plan.dequantized


@pytest.mark.parametrize("arch", ["910b", "910_93", "950"])
def test_a_cache_in_int8_on_the_npu(arch):
    """The vendor's own layout, with a scale a token and head, and its attention, for prompts and tokens."""
    runner = plan("npu", arch=arch, kv_cache_dtype="int8", strict=True)
    assert chosen(runner, "attention") == {"torch_npu:attention_int8"}
    assert chosen(runner, "kv_write") == {"torch_npu:kv_write_int8"}
    assert {layout.name for layout in runner.plan.layouts.values()} == {"npu_nd_128_int8"}


@pytest.mark.parametrize("device", ["xpu:intel", "xpu:kunlun"])
def test_a_cache_that_no_kernel_reads_is_marked(device):
    runner = plan(device, kv_cache_dtype="int8")
    data = runner.explain()
    marked = {s["op"]: s["chosen"]["kv_dtype_unread"] for s in data["sites"] if s["chosen"]["kv_dtype_unread"]}
    assert set(marked) == {"attention"} and "reads no KV cache in int8" in marked["attention"]
    assert "attention" in {item["op"] for item in data["on_torch"]}
    text = runner.explain_text()
    assert "hot ops on torch because of the KV cache's dtype: attention" in text
    last = [line for line in text.rstrip().splitlines() if not line.startswith("faster with --dtype")][-1]
    assert "every hot op has a kernel" not in text and last.startswith("hot ops on torch's")
    assert "on torch because" not in plan(device).explain_text()
    with pytest.raises(BindError, match="run on torch because of the KV cache's dtype"):
        plan(device, kv_cache_dtype="int8", strict=True)


def test_the_option_that_a_cache_no_kernel_reads_has_is_named():
    """Index keys have one of their own, which is not blamed for the cache, nor the cache's for it."""
    chosen_tokens = read_shipped_config("config:glm-5")
    with pytest.raises(BindError, match="index_select reads no KV cache in fp8") as failure:
        plan("npu", chosen_tokens, index_key_dtype="fp8", strict=True)
    assert failure.value.remedy == "pass index_key_dtype='none', or drop strict"
    for device, config, options, reason in [
        ("npu", chosen_tokens, {"index_key_dtype": "fp8"}, "because of index_key_dtype = 'fp8': index_select ("),
        ("xpu:intel", LLAMA, {"kv_cache_dtype": "int8"}, "because of kv_cache_dtype = 'int8': attention ("),
    ]:
        runner = plan(device, config, **options)
        said = [*describe_slow_ops(runner.plan, RunnerOptions(dtype="bfloat16", **options), "model")]
        assert [words for words in said if reason in words] and len(said) == 1
