"""Every family under every layout: MODELS (a folder of model folders). Reports which tensors come back otherwise than they were read."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from megatron.core import parallel_state

from megaflow.actor.model import build_model, global_parameters
from megaflow.config.schema import ParallelConfig
from megaflow.parallel.mesh import Axes, Mesh
from megaflow.shape import read_shape
from megaflow.weights import folder, gather
from tests import tiny
from tests.ranks import report

LAYOUTS = {
    "tp=2 ep=2": ParallelConfig(tp=2, ep=2, sp=True),
    "tp=2 ep=2 etp=2": ParallelConfig(tp=2, ep=2, etp=2, sp=True),
    "ep=2 pp=2": ParallelConfig(ep=2, pp=2),
    "tp=2 pp=2 vpp=2": ParallelConfig(tp=2, pp=2, vpp=2, sp=True),
    "cp=2 ep=2": ParallelConfig(cp=2, ep=2),
}


def main() -> None:
    models = sorted(Path(sys.argv[1]).iterdir())
    mesh, found = Mesh.create(ParallelConfig()), {}
    for name, parallel in LAYOUTS.items():
        parallel_state.destroy_model_parallel()
        here = Mesh(Axes.start(parallel, 60.0), mesh.rollout, mesh.host_group, mesh.watch, 60.0)
        for model in models:
            found[f"{model.name} {name}"] = differing(model, parallel, here)
    report(differing=found)
    mesh.close()


def differing(model: Path, parallel: ParallelConfig, mesh: Mesh) -> list[str]:
    shape = read_shape(model)
    if shape.experts is None:
        parallel = ParallelConfig(tp=parallel.tp, pp=parallel.pp, vpp=parallel.vpp, cp=parallel.cp, sp=parallel.sp)
    cfg = tiny.config(str(model))
    parameters = global_parameters(build_model(shape, tiny.with_parallel(cfg, parallel), mesh, torch.device("cpu")))
    for p in parameters.values():
        p.data.fill_(float("nan"))
    folder.load(model, shape, parameters, mesh.tp.size, mesh.tp.index, mesh.etp.size, mesh.etp.index)
    wrong = [name for name, p in parameters.items() if p.isnan().any()]
    source = folder.Folder(model)
    unseen = set(source.files)
    for name, tensor in gather.full_tensors(shape, parameters, mesh, torch.float32, parallel.vpp):
        unseen.discard(name)
        if not torch.equal(tensor, source.read(name)):
            wrong.append(name)
    return wrong + sorted(unseen)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
