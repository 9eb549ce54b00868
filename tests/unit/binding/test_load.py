"""Reading weights: what is checked first, in which order, how much is held, and what each rank reads."""

import math
import warnings
import weakref

import pytest
import torch

from inferplane.binding import DictSource, link, load, view_of
from inferplane.binding.load import DummySource, assemble, is_finite
from inferplane.errors import CheckpointError, InferplaneWarning, KernelError, warn
from inferplane.ops import Embedding, GatedMLP, Linear, LMHead, MoEExperts, encode
from inferplane.ops.draw import Draw
from inferplane.types import Packing, Placement, QTensor, Shard, Weight, When
from tests.unit.support.small import BF16, F32, encoding, kernel, plan, tensors_for, tiny_llama, tiny_v3, w

T = Packing("v.t", lambda x: x.t().contiguous())


class Recording(DictSource):
    """Notes every read, and which destinations are still alive when the next one begins."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.reads, self.out, self.peak = [], [], 0

    def read_into(self, name, out, shard):
        base = out._base if out._base is not None else out
        if not self.out or self.out[-1]() is not base:
            self.out.append(weakref.ref(base))
        alive = {id(r()): r().numel() * r().element_size() for r in self.out if r() is not None}
        self.peak = max(self.peak, sum(alive.values()))
        self.reads.append(name)
        super().read_into(name, out, shard)


def test_every_weight_is_what_its_parts_are():
    model = tiny_v3(mtp=True)
    t = tensors_for(model)
    p = plan(model)
    packed = load(p, DictSource(t)).packed
    for weight in p.weights.values():
        got = packed[id(weight), "canonical"]
        assert got.shape == weight.shape and got.dtype is F32
        if weight.parts:
            assert torch.equal(got.flatten(), torch.cat([t[n].flatten() for n in weight.parts]))
        else:
            assert torch.equal(got, weight.make())
    assert packed.keys() == {(id(weight), "canonical") for weight in p.weights.values()}


def test_dtypes_are_the_weights_own_or_the_plans():
    p = plan(tiny_v3(), dtype=BF16)
    packed = load(p, DictSource(tensors_for(p.model))).packed
    for path, weight in p.model.weights():
        fixed = path.endswith(("route.bias", "rope.table"))
        assert packed[id(weight), "canonical"].dtype is (F32 if fixed else BF16), path


def test_constants_have_the_plans_dtype_unless_they_state_one():
    ones = Weight((), (4,), make=lambda: torch.ones(4))
    read, made_up = assemble(ones, DictSource({}), BF16, {}), DummySource().draw(ones, BF16)
    for got in (read, made_up, Draw(0, BF16).weight(ones)):
        assert got.dtype is BF16 and torch.equal(got, torch.ones(4).bfloat16())


def test_weights_are_read_one_after_the_other():
    model = tiny_llama()
    source = Recording(tensors_for(model))
    p = plan(model)
    load(p, source)
    order = [part for i in p.packings for part in p.weights[i].parts]
    assert source.reads == order and len(set(order)) == len(order), "each part once, in the order of the model"


def test_at_most_one_source_is_held_beside_what_is_kept():
    """All weights repacked: were sources dropped late, two of them would be alive at once."""
    model = tiny_llama(num_hidden_layers=4)
    ops = "linear", "lm_head", "embedding"
    packs = [kernel(op, packs={"weight": Packing("v.copy", lambda x: x.clone())}) for op in ops]
    norms = [kernel("add_rms_norm", packs={"norm.weight": Packing("v.copy", lambda x: x.clone())})]
    p = plan(model, *packs, *norms)
    source = Recording(tensors_for(model))
    load(p, source)
    largest = max(weight.nbytes(F32) for weight in p.weights.values() if weight.parts)
    assert source.peak == largest


def test_what_is_kept_as_it_is_was_read_in_place():
    model = tiny_llama()
    source = Recording(tensors_for(model))
    p = plan(model)
    packed = load(p, source).packed
    kept = {t.data_ptr() for t in packed.values()}
    read = {r().data_ptr() for r in source.out if r() is not None}
    assert read <= kept and len(read) == sum(1 for weight in p.weights.values() if weight.parts)


def test_experts_are_held_once_while_they_are_stacked():
    parts = tuple(f"e{e}.{x}" for e in range(8) for x in ("gate", "up"))
    op = MoEExperts(Weight(parts, (8, 48, 32), format="int8_row"), w("down", 8, 32, 24))
    alive, peak = [], [0]

    def read(source, name, shard):
        q = encode(torch.randn(24, 32), "int8_row")
        alive.append(weakref.ref(q.data))
        peak[0] = max(peak[0], sum(r() is not None for r in alive))
        return q

    t = {n: torch.empty(24, 32) for n in parts} | {"down": torch.randn(8, 32, 24)}
    load(plan(op, kernel("moe_experts")), DictSource(t), readers={"int8_row": read})
    assert peak[0] <= 4, "the parts of one expert, and those of the one before"


def test_progress_is_told_after_each_weight():
    p, told = plan(tiny_llama(), kernel("lm_head", packs={"weight": T})), []
    loaded = load(p, DictSource(tensors_for(p.model)), progress=lambda done, total: told.append((done, total)))
    done = [d for d, _ in told]
    assert len(told) == len(p.packings) and done == sorted(done) and done[0] > 0
    assert {total for _, total in told} == {p.weight_bytes} == {done[-1]} == {loaded.nbytes}


def test_names_that_nobody_asked_for():
    t = tensors_for(tiny_llama()) | {"rotary.inv_freq": torch.ones(2), "a.stranger": torch.ones(1)}
    p = plan(tiny_llama())
    loaded = load(p, DictSource(t))
    assert loaded.unused == ["a.stranger", "rotary.inv_freq"] and loaded.ignored == []
    loaded = load(p, DictSource(t), ignore=("*.inv_freq", "model.norm.*"))
    assert loaded.unused == ["a.stranger"] and loaded.ignored == ["rotary.inv_freq"]


def test_what_a_reader_reads_is_used():
    def read(source, name, shard):
        scale = torch.empty(4, 1)
        source.read_into(name + "_scale", scale, Shard())
        return QTensor(torch.ones(4, 8, dtype=torch.int8), scale, block=(1, 8))

    op = Linear(w("w", 4, 8, format="int8_row"))
    source = DictSource({"w": torch.empty(4, 8), "w_scale": torch.ones(4, 1), "other": torch.ones(1)})
    assert load(plan(op, kernel("linear")), source, readers={"int8_row": read}).unused == ["other"]


# -- several packings


def test_each_packing_is_made_from_the_canonical_form():
    tied = tiny_llama(tie_word_embeddings=True)
    p = plan(tied, kernel("lm_head", packs={"weight": T}))
    source = Recording(tensors_for(tied))
    packed = load(p, source).packed
    embed = tied.embed.weight
    assert torch.equal(packed[id(embed), "v.t"], packed[id(embed), "canonical"].t())
    assert source.reads.count("model.embed_tokens.weight") == 1


def test_an_equal_name_is_packed_once():
    calls = []
    pack = Packing("v.t", lambda x: calls.append(1) or x)
    shared = w("w", 8, 8)
    op = GatedMLP(Linear(Weight(("g",), (16, 8))), Linear(shared))
    p = plan(op, kernel("linear", packs={"weight": pack}))
    load(p, DictSource(tensors_for(op)))
    assert len(calls) == 2, "once a weight, not once a step kind"


def test_a_packing_that_raises_names_its_users():
    def broken(x):
        raise ValueError("stride 13")

    p = plan(tiny_llama(), kernel("linear", packs={"weight": Packing("v.nz", broken)}))
    name = "model.layers.0.self_attn.q_proj.weight"
    words = rf"'v.nz' of \('{name}',\) raised ValueError: stride 13.*layers.0.attn.qkv vendor:linear"
    with pytest.raises(KernelError, match=words):
        load(p, DictSource(tensors_for(p.model)))


# -- what cannot be read


def failing(model, change, words, **options):
    source = Recording(tensors_for(model))
    change(source.tensors)
    with pytest.raises(CheckpointError, match=words):
        load(plan(model, **options), source)
    assert source.reads == [], "nothing is read before everything was looked for"


def test_missing_tensors_are_counted_and_named():
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(3)]

    def drop(t):
        for n in names:
            del t[n]

    failing(tiny_llama(), drop, rf"lacks 3 tensor\(s\).*{', '.join(names)}\.")


def test_many_missing_tensors_are_cut_short():
    failing(tiny_llama(), dict.clear, r"lacks 30 tensor\(s\).*embed_tokens.* and 25 more\. To do")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.mlp.down_proj.weight", (64, 95)),
        ("model.layers.1.mlp.down_proj.weight", (96, 64)),
        ("model.layers.1.mlp.up_proj.weight", (95, 64)),
        ("model.layers.1.mlp.up_proj.weight", ()),
        ("model.layers.1.mlp.up_proj.weight", (96 * 64,)),
        ("model.norm.weight", (63,)),
        ("model.norm.weight", (64, 2)),
        ("model.norm.weight", (64, 1)),
        ("model.norm.weight", ()),
    ],
)
def test_misshapen_tensors_are_named_with_their_shape(name, shape):
    failing(
        tiny_llama(),
        lambda t: t.update({name: torch.ones(shape)}),
        rf"1 tensor\(s\).*{name} \({', '.join(map(str, shape))}",
    )


def test_a_format_without_a_reader():
    op = Linear(w("w", 4, 8, format="int8_row"))
    with pytest.raises(CheckpointError, match=r"'int8_row' of w has no reader.*fp8_block"):
        load(plan(op), DictSource({"w": torch.ones(4, 8)}), readers={"fp8_block": None})


# -- optional weights


def test_optional_weights():
    zeros = torch.zeros(4)
    op = Linear(w("w", 4, 8), bias=w("b", 4, optional=True, default=lambda: zeros))
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    p = plan(op)
    for tensors, bias in (({"w": weight}, zeros), ({"w": weight, "b": torch.ones(4)}, torch.ones(4))):
        got = link(p, load(p, DictSource(tensors)).packed)["decode"]
        assert torch.equal(view_of(got).bias, bias) and got(x).shape == (2, 4)
    bare = Linear(w("w", 4, 8), bias=w("b", 4, optional=True))
    failing(bare, lambda t: t.pop("b"), r"lacks 1 tensor\(s\).*: b\.")


# -- ranks


@pytest.mark.parametrize("format", ["plain", "int8_row", "int8_group", "fp8_block"])
def test_rank_0_and_rank_1_make_the_whole(format):
    size = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 98}
    whole = tiny_llama(format=format, **size)
    source = DictSource(tensors_for(whole))

    def values(model):
        p = plan(model, kernel("linear"))  # takes plain weights only: quantized ones are expanded
        packed = load(p, source, readers=encoding(format)).packed
        return {path: next(v for (i, _), v in packed.items() if i == id(weight)) for path, weight in model.weights()}

    one, ranks = values(whole), [values(tiny_llama(format=format, placement=Placement(r, 2), **size)) for r in range(2)]
    for path, full in one.items():
        a, b = (rank[path] for rank in ranks)
        if path.endswith(("attn.o.weight", "mlp.down.weight")):
            assert torch.equal(torch.cat((a, b), 1), full), path
        elif path.endswith(("attn.qkv.weight", "gate_up.weight")):
            parts = (256, 128, 128) if "qkv" in path else (512, 512)
            halves = [
                torch.cat(pair) for pair in zip(a.split([n // 2 for n in parts]), b.split([n // 2 for n in parts]))
            ]
            assert torch.equal(torch.cat(halves), full), path
        elif full.shape[0] == size["vocab_size"]:
            assert torch.equal(torch.cat((a, b)), full), path
        else:
            assert torch.equal(a, full) and torch.equal(b, full), path


def test_ranks_of_stacked_experts():
    parts, t = tuple(f"e{e}" for e in range(3)), {f"e{e}": torch.randn(8, 6) for e in range(3)}
    for axis, shape in ((0, (3, 4, 6)), (1, (3, 8, 3))):
        got = []
        for rank in range(2):
            op = MoEExperts(Weight(parts, shape, shard=Shard(axis, rank, 2)), w("d", 3, 2, 2))
            packed = load(plan(op), DictSource(t | {"d": torch.ones(3, 2, 2)})).packed
            got.append(packed[id(op.gate_up), "canonical"])
        assert torch.equal(torch.cat(got, axis + 1), torch.stack([t[n] for n in parts]))


def test_a_tensor_that_ranks_cannot_share():
    op = Linear(w("w", 5, 8, shard=Shard(0, 1, 2)))
    with pytest.raises(CheckpointError, match="Tensor w has 11 entries in dimension 0, which 2 ranks cannot share"):
        load(plan(op), DictSource({"w": torch.ones(11, 8)}))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_dtype_that_means_nothing_without_scales(dtype):
    name = "model.layers.1.mlp.up_proj.weight"
    words = rf"1 tensor\(s\).*without scales: {name} {str(dtype)[6:]}.*quantization_config"
    failing(tiny_llama(), lambda t: t.update({name: t[name].to(dtype)}), words)


def test_experts_that_only_add_up():
    """One expert too long and one too short are not two experts."""
    op, words = (
        MoEExperts(Weight(("e0", "e1"), (2, 4, 6)), w("d", 2, 6, 2)),
        r"e0 \(5, 6\), e1 \(3, 6\) for \(2, 4, 6\)",
    )
    failing(op, lambda t: t.update(e0=torch.ones(5, 6), e1=torch.ones(3, 6)), words)


@pytest.mark.parametrize("case", ["exchanged", "empty", "gate and up", "biases", "experts"])
def test_parts_that_only_add_up(case):
    """Each part of a fused weight has its own size; else another matrix would be cut from the same numbers."""
    qkv, mlp = "model.layers.0.self_attn.{}_proj.{}", "model.layers.1.mlp.{}_proj.weight"

    def spoil(t):
        q, k, v = (qkv.format(part, "bias" if case == "biases" else "weight") for part in "qkv")
        if case in ("exchanged", "biases"):
            t[q], t[k] = t[k], t[q]
        elif case == "empty":
            t[k], t[v] = t[k][:0], torch.cat((t[v], t[v]))
        else:
            gate, up = (mlp.format(part) for part in ("gate", "up"))
            both = torch.cat((t[gate], t[up]))
            t[gate], t[up] = both[:3].clone(), both[3:].clone()

    if case == "experts":
        op = MoEExperts(Weight(("g", "u"), (1, 8, 6), rows=(4, 4)), w("d", 1, 6, 4))
        words = r"g \(3, 6\), u \(5, 6\) for \(1, 8, 6\) of 4 \+ 4 rows"
        return failing(op, lambda t: t.update(g=torch.ones(3, 6), u=torch.ones(5, 6)), words)
    bias = {"attention_bias": True} if case == "biases" else {}
    return failing(tiny_llama(**bias), spoil, r"1 tensor\(s\) have other shapes than the model's config says: .* rows")


def test_dummy_weights_need_no_checkpoint():
    p = plan(tiny_v3(format="fp8_block"), kernel("linear", when=When(formats=("plain", "fp8_block"))))
    one, same, other = (load(p, DummySource(seed)).packed for seed in (1, 1, 2))
    for (i, name), value in one.items():
        weight = p.weights[i]
        kept = [torch.as_tensor(x[i, name].data) for x in (one, same, other)]
        assert tuple(value.shape) == weight.shape and torch.equal(kept[0].float(), kept[1].float())
        assert weight.make is not None or not torch.equal(kept[0].float(), kept[2].float())
        if weight.make is None and len(weight.shape) > 1 and not isinstance(value, QTensor):
            assert value.float().std().item() == pytest.approx(weight.shape[-1] ** -0.5, rel=0.2)


def test_one_weight_used_twice_is_one():
    shared = w("e", 9, 8)
    for op in (Embedding(shared), LMHead(shared)):
        packed = load(plan(op), DictSource({"e": torch.ones(9, 8)})).packed
        assert packed.keys() == {(id(shared), "canonical")}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_finite(dtype):
    """One value decides, and none does that is a number, also where the sum of all is too large for one."""
    largest = torch.finfo(dtype).max
    for values in ([largest, largest, 1.0], [-largest, -largest], [largest, -largest], [0.0], []):
        assert is_finite(torch.tensor(values, dtype=dtype))
    for bad in (math.nan, math.inf, -math.inf):
        for values in ([bad], [1.0, bad, 2.0], [largest, largest, bad], [bad, -bad]):
            assert not is_finite(torch.tensor(values, dtype=dtype))


def test_a_warning_names_the_line_outside_the_packages():
    """Whichever of them it comes from."""
    package = {"__name__": "inferplane_toy.kernels", "warn": warn}
    exec("def load():\n    warn('slow')", package)
    core = {"__name__": "inferplane.engine.clients.llm", "load": package["load"]}
    exec("def start():\n    load()", core)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        core["start"]()
    ours = [(str(t.message), t.filename) for t in told if issubclass(t.category, InferplaneWarning)]
    assert ours == [("slow", __file__)]
