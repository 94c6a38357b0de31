"""A transformers model's tensors under the names of its published files: in memory, a layer's experts are two tensors."""

from __future__ import annotations

from torch import Tensor

from megaflow.shape import ModelShape, families


def published_tensors(tensors: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """tensors: a model's state_dict(keep_vars=True), or anything under the same names -> by published name; experts are views."""
    names = families().get(shape.family).names
    gate, up, down = names.expert_parts
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".mlp.")
        if rest == "experts.gate_up_proj":  # [E, 2 F, H], gate over up
            for e, both in enumerate(tensor.detach()):
                here = f"{layer}.{names.expert.format(e=e)}"
                found[f"{here}{gate}.weight"], found[f"{here}{up}.weight"] = both.chunk(2)
        elif rest == "experts.down_proj":  # [E, H, F]
            found |= {f"{layer}.{names.expert.format(e=e)}{down}.weight": one for e, one in enumerate(tensor.detach())}
        elif rest == "gate.weight":
            found[f"{layer}.{names.router}"] = tensor
        else:
            found[name] = tensor
    return found
