"""Train torchtitan's Llama under plain Inductor and under ssdtrain, and compare to the bit. One process per rank.

    python -m torch.distributed.run --nproc-per-node 2 tests/trainers/torchtitan_training.py

torchtitan compiles the model block by block and shards it. It knows the name of a backend, but no options. Its own
attention needs a GPU, so the blocks have the module that torchtitan keeps for its image model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import torch
from small_training import BATCH, EVERYTHING, SEQUENCE, Text, Trained, compare

LAYERS = 2
STEPS = 4


def train(backend: str, checkpoint: str, *, flex: bool = False) -> Trained:
    """torchtitan's debug model, made parallel and compiled by torchtitan."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel", attn_backend="flex" if flex else "varlen")
    spec.model.layers = spec.model.layers[:LAYERS]
    for layer in () if flex else spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = spec.model.build()
    parallelism = ParallelismConfig(data_parallel_shard_degree=-1, spmd_backend="partial_dtensor")
    model = spec.parallelize_fn(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, torch.distributed.get_world_size()),
        training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=True, components=["model"], backend=backend),
        ac_config={"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[checkpoint],
        dump_folder="dump",
    )
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
    model.init_states()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses: list[float] = []
    text = Text(STEPS * BATCH, skip=STEPS * BATCH * torch.distributed.get_rank())
    for batch in torch.utils.data.DataLoader(text, batch_size=BATCH):
        tokens = batch["input_ids"]
        logits = model(tokens, positions=torch.arange(SEQUENCE).expand(BATCH, -1))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", choices=["none", "full", "selective"], nargs="+", default=["none"])
    parser.add_argument("--flex", action="store_true", help="show that torchtitan refuses its own attention")
    chosen = parser.parse_args()
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes a GPU for granted
    os.environ["SSDTRAIN_OPTIONS"] = json.dumps(EVERYTHING)
    torch._inductor.config.cpp.simdlen = 1  # kernels without vector instructions, which compile in half the time
    torch.distributed.init_process_group("gloo")
    if chosen.flex:
        try:
            train("ssdtrain", "none", flex=True)
        except ValueError as error:
            sys.stdout.write(f"{error}\n")
        return
    for checkpoint in chosen.checkpoint:
        moved = compare(lambda backend, checkpoint=checkpoint: train(backend, checkpoint))
        sys.stdout.write(f"checkpoint {checkpoint}: equal, {moved.offloads} tensors moved\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
