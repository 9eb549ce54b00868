"""Rotates a model's residual stream, and the values of its attention, by its weights alone: what it computes stays.

Where activations are quantized to 4 bits, what the second product of a gated MLP reads is rotated too, while running
(`rotated_activation`): the checkpoint states it.

The hidden states are multiplied by an orthogonal matrix Q. RMS norms do not see it once their gain is in the products
behind them: products that read the stream take `W diag(gain) Q`, those that add to it `Q^T W`. Which is which is found
by running each layer (`NormReaders`), and each rotated layer is compared with the layer as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane.calibrate.calibrator import EXACT
from inferplane.calibrate.layers import Hidden, LayeredModel, bind, make_step, run_layer
from inferplane.calibrate.observe import NormReaders, ProductKey, ProductObserver
from inferplane.calibrate.rotations import Rotated, RotatedSource, Rotation
from inferplane.errors import UnsupportedModelError
from inferplane.models.build import Build
from inferplane.models.draft_layers import find_stored
from inferplane.models.reading.config import Config
from inferplane.models.registry import build
from inferplane.models.writing.compressed_form import find_patterns
from inferplane.models.writing.fused_names import is_stored_within, list_parts
from inferplane.models.writing.model_to_quantize import ModelToQuantize
from inferplane.ops import CausalLM, Op, RotatedActivation
from inferplane.ops.basic import RMSNorm
from inferplane.quant.instructions import TRANSFORMS, describe_rotations
from inferplane.quant.online import find_scheme
from inferplane.types import Weight

DOWN = ".down_proj.weight"
"""Ends the names of weights whose input can be rotated while running."""
UNTIED = {"tie_word_embeddings": False}
"""The head reads the stream behind a norm, the embedding writes it: rotated, they are two tensors."""


def rotate(
    model: ModelToQuantize,
    ids: Sequence[int],
    seed: int = 0,
    plugins: Mapping[str, Any] | None = None,
    make: Callable[[int, int], Rotation] = Rotation,
    *,
    inner: bool = False,
) -> ModelToQuantize:
    """The same model with a rotated residual stream and rotated values, read from the same files.

    Args:
        model: the model, not quantized.
        ids: token ids that each layer is compared on.
        seed: of the rotation.
        plugins: model families of plugins.
        make: makes the rotation, from the number of channels and the seed.
        inner: rotate what the second products of gated MLPs read, while running.

    Raises:
        UnsupportedModelError: the model is quantized, or a rotation would change what it computes; says where.
        CheckpointError: a tensor cannot be read.
    """
    if model.config.get("quantization_config"):
        raise UnsupportedModelError(f"{model.name} is quantized.", remedy="rotate the model that it was made of")
    before = build(Build(model.config, positions=len(ids)), plugins)
    blocks = _find_blocks(before) if inner else {}
    changes = {**UNTIED, **_state_blocks(blocks)}
    config = Config({**model.config, **changes}, model.config.name)
    after = build(Build(config, positions=len(ids)), plugins)
    predicting = build(Build(model.config, positions=len(ids), mtp=True), plugins)
    if find_stored(predicting, set(model.source.names())):
        raise UnsupportedModelError(
            f"{model.name} has prediction layers, which read the residual stream too.",
            remedy="quantize without a rotation, or take a copy without them",
        )
    rotating = _RotatingModel(
        model.name, LayeredModel(before, model.source, {}), after, make(_width(before), seed), ids, blocks
    )
    rotating.run()
    found, aliases = dict(rotating.changes), rotating.aliases
    _include_wholes(found, rotating.source())
    return replace(model, config=config, source=RotatedSource(model.source, found, aliases), changes=changes)


def _find_blocks(model: CausalLM) -> dict[str, int]:
    """Tensors of the second products of gated MLPs -> the largest power of two that divides their columns."""
    found = {}
    for _, op in model.sites():
        if op.is_gated_mlp and not isinstance(op.act, RotatedActivation):  # type: ignore[attr-defined]
            for part in op.down.weight.parts:  # type: ignore[attr-defined]
                columns = op.down.weight.shape[-1]  # type: ignore[attr-defined]
                found[part] = columns & -columns
    return {part: block for part, block in found.items() if block > 1 and part.endswith(DOWN)}


def _state_blocks(blocks: Mapping[str, int]) -> dict[str, Any]:
    """The entry of the config that says how inputs are rotated; empty without any."""
    patterns = find_patterns({part.removesuffix(".weight"): str(block) for part, block in blocks.items()})
    stated = {int(block): targets for block, targets in patterns.items()}
    return {TRANSFORMS: describe_rotations(stated)} if stated else {}


def rotates_inner(scheme: str) -> bool:
    """Whether a scheme loses so much in the second products of MLPs that their inputs are rotated while running: those
    that quantize activations to 4 bits."""
    return any(quant.format in ("int4", "mxfp4") for quant in find_scheme(scheme).activation_quants.values())


def _width(model: CausalLM) -> int:
    return next(w.shape[-1] for _, w in model.embed.weights() if len(w.shape) == 2)


class _RotatingModel:
    """Finds how the tensors of a model change.

    Args:
        name: of the model. before: as it is. after: its tree of ops where the head is a tensor of its own.
        rotation: of the residual stream. ids: what layers are compared on.
        blocks: tensors whose input is rotated while running -> columns that are rotated together.

    Attributes: `changes`, by tensor; `aliases`, the head's tensor -> the embedding's.
    """

    def __init__(
        self,
        name: str,
        before: LayeredModel,
        after: CausalLM,
        rotation: Rotation,
        ids: Sequence[int],
        blocks: Mapping[str, int],
    ) -> None:
        self.blocks = blocks
        self.name, self.before, self.tree, self.rotation, self.ids = name, before, after, rotation, ids
        self.changes: dict[str, Rotated] = {}
        self.aliases: dict[str, str] = {}

    def source(self) -> RotatedSource:
        """The tensors as far as they are known to change."""
        return RotatedSource(self.before.source, self.changes, self.aliases)

    def _after(self) -> LayeredModel:
        return LayeredModel(self.tree, self.source(), {})

    def run(self) -> None:
        """Go through the model in order."""
        for _, weight in self.tree.embed.weights():
            self.changes.update(dict.fromkeys(weight.parts, Rotated(columns=self.rotation)))
        (hidden,) = self.before.embed([self.ids])
        (found,) = self._after().embed([self.ids])
        self._compare("its embedding", found.total(), hidden.total())
        pairs = zip(self.before.model.layers, self.tree.layers, strict=True)
        for number, (layer, after) in enumerate(pairs):
            hidden = self._rotate_layer(f"layer {number}", layer, after, hidden)
        self._rotate_head(hidden)

    def _rotate_state(self, hidden: Hidden) -> Hidden:
        """The hidden state as the rotated layers see it."""
        residual = hidden.residual
        if residual is not None:
            parts = residual.unflatten(-1, (-1, hidden.x.shape[-1]))
            residual = self.rotation.columns(parts).flatten(-2)
        return Hidden(self.rotation.columns(hidden.x), residual, hidden.positions)

    def _rotate_layer(self, where: str, layer: Op, after: Op, hidden: Hidden) -> Hidden:
        """Add a layer's changes; returns what the layer returns as it is."""
        values, readers = self.before.load(layer), NormReaders()
        observed = [w for _, w in layer.weights() if w.parts and len(w.shape) > 1]
        products: set[int] = set()

        def see(key: ProductKey, x: torch.Tensor) -> torch.Tensor:
            products.add(key.weight)
            return readers.see(key, x)

        with ProductObserver(values, observed, see):
            result = run_layer(layer, bind(layer, values, readers.around), hidden, self.ids)
        stream = dict(_changes_of_stream(layer, readers, products, values, self.rotation))
        inside = dict(_changes_of_values(layer, stream, set(self.before.source.names())))
        for extra in (inside, {}):
            found_here = stream | extra
            for part in {part for _, w in layer.weights() for part in w.parts} & self.blocks.keys():
                found_here[part] = replace(found_here.get(part, Rotated()), block=self.blocks[part])
            self.changes.update(found_here)
            rotated = self._rotate_state(hidden)
            found = run_layer(after, bind(after, self._after().load(after)), rotated, self.ids).total()
            if self._is_same(found, result.total()):
                return result
        self._compare(where, found, result.total())
        return result

    def _rotate_head(self, hidden: Hidden) -> None:
        """Add the changes of the final norm and of the head."""
        model = self.before.model
        values = {**self.before.load(model.norm), **self.before.load(model.head)}
        x, _ = bind(model.norm, values)(hidden.x, hidden.residual)
        expected = bind(model.head, values)(x, make_step(self.ids))
        norms = [op for _, op in model.norm.sites() if isinstance(op, RMSNorm)]
        if len(norms) != 1:
            what = f"{self.name} cannot be rotated: there is no RMS norm before its head."
            raise UnsupportedModelError(what, remedy=_REMEDY)
        gain = values[id(norms[0].weight)] + norms[0].offset
        self.changes.update(dict.fromkeys(norms[0].weight.parts, Rotated(ones=1.0 - norms[0].offset)))
        embedding = self.tree.embed.weight.parts[0]
        for _, weight in self.tree.head.weights():
            if len(weight.shape) == 2:
                self.changes.update(dict.fromkeys(weight.parts, Rotated(gain, self.rotation)))
                missing = [part for part in weight.parts if self.before.source.shape(part) is None]
                self.aliases.update(dict.fromkeys(missing, embedding))
        after, rotated = self._after(), self._rotate_state(hidden)
        new = {**after.load(self.tree.norm), **after.load(self.tree.head)}
        x, _ = bind(self.tree.norm, new)(rotated.x, rotated.residual)
        found = bind(self.tree.head, new)(x, make_step(self.ids))
        self._compare("its head", found, expected, is_stream=False)

    def _is_same(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        expected = self.rotation.columns(expected)
        return bool((found - expected).abs().max() <= EXACT * expected.abs().max())

    def _compare(self, where: str, found: torch.Tensor, expected: torch.Tensor, *, is_stream: bool = True) -> None:
        expected = self.rotation.columns(expected) if is_stream else expected
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        if not error <= EXACT:
            raise UnsupportedModelError(
                f"{self.name} cannot be rotated: {where} would return something else, by {error:.1e} of the largest "
                "entry. A rotation passes RMS norms that products read, and products, but no norm behind a sublayer, "
                "no other norm and nothing that reads single channels.",
                remedy=_REMEDY,
            )


_REMEDY = "quantize without a rotation: pss,gptq or gptq"


def _changes_of_stream(
    layer: Op, readers: NormReaders, products: Collection[int], values: Mapping[int, torch.Tensor], rotation: Rotation
) -> Iterator[tuple[str, Rotated]]:
    """What changes in a layer with the residual stream, by tensor."""
    weights = {id(w): w for _, w in layer.weights() if w.parts}
    reading: set[int] = set()
    for norm, keys in readers.found.items():
        if not isinstance(norm, RMSNorm) or norm.weight.shape[0] != rotation.size:
            continue
        gain = values[id(norm.weight)] + norm.offset
        for key in keys:
            if key.weight in weights and weights[key.weight].shape[-1] == rotation.size:
                reading.add(key.weight)
                for part in weights[key.weight].parts:
                    yield part, Rotated(gain, rotation)
        for part in norm.weight.parts:
            yield part, Rotated(ones=1.0 - norm.offset)
    for i, weight in weights.items():
        if i in products and i not in reading and weight.shape[-2] == rotation.size:
            for part in weight.parts:
                yield part, Rotated(rows=rotation)
    for _, op in layer.sites():
        for names in (("weight", "bias"), ("down", "down_bias")):
            found, added = (getattr(op, name, None) for name in names)
            is_writer = isinstance(found, Weight) and id(found) in products and id(found) not in reading
            if is_writer and isinstance(added, Weight) and added.shape[-1] == rotation.size:
                for part in added.parts:
                    yield part, Rotated(columns=rotation)


def _changes_of_values(
    layer: Op, stream: Mapping[str, Rotated], stored: Collection[str]
) -> Iterator[tuple[str, Rotated]]:
    """What changes beside that if each head's values are rotated, by tensor; not where queries, keys and values are
    stored as one, whose rows would change apart."""
    for _, op in layer.sites():
        if not op.has_grouped_queries:
            continue
        qkv, out, dim = op.qkv, op.o, op.v_dim or op.head_dim  # type: ignore[attr-defined]
        parts = [weight.parts for weight in (qkv.weight, qkv.bias) if weight is not None]
        if not all(len(each) == 3 and not is_stored_within(each[2], stored) for each in parts):
            continue
        rotation = Rotation(dim)
        for _, _, part in parts:
            yield part, replace(stream.get(part, Rotated()), head_rows=rotation)
        for part in out.weight.parts:
            yield part, replace(stream.get(part, Rotated()), head_columns=rotation)


def _include_wholes(changes: dict[str, Rotated], source: RotatedSource) -> None:
    """Let tensors that hold several projections change as these do, which all read the same."""
    for name in source.names():
        if name not in changes and (parts := [part for part in list_parts(name) if part in changes]):
            changes[name] = changes[parts[0]]
