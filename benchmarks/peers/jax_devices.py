"""JAX on several host devices of one process: a jitted update, the batch sharded over them."""

from __future__ import annotations

import os

from protocol import NotOfferedError, Wanted, run, serve, wanted

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        f"--xla_force_host_platform_device_count={wanted().workers}",
        # One thread for each device.
        *(["--xla_cpu_multi_thread_eigen=false"] if "one thread" in wanted().variant else []),
    ]
)

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import PER_WORKER, arrays, order
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# of a workload: units of the dense layers behind two 5x5 convolutions of 32 and 64 filters
NETWORKS = {"seed": (1024, 10, 10), "lenet5": (512, 10)}
RATE, MOMENTUM = 0.01, 0.9

Tree = Any


def peer(wanted: Wanted) -> None:
    """Train on host devices."""
    if wanted.workload != "seed":
        raise NotOfferedError("not written for it")
    devices = jax.devices()
    assert len(devices) == wanted.workers
    mesh = Mesh(np.array(devices), ("rows",))
    cut, whole = NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())
    images, labels = arrays(wanted.workload)
    images = images.transpose(0, 2, 3, 1)
    rows = PER_WORKER[wanted.workload] * wanted.workers
    weights = jax.device_put(_weights(images.shape, NETWORKS[wanted.workload]), whole)
    state = weights, jax.tree.map(jnp.zeros_like, weights)
    dtype = jnp.bfloat16 if wanted.precision == "bf16" else jnp.float32
    update = jax.jit(partial(_update, dtype), donate_argnums=0, out_shardings=(whole, whole))
    batches = order(len(images), rows)

    def step() -> None:
        nonlocal state
        batch = next(batches)
        some, classes = jax.device_put((images[batch], labels[batch]), (cut, cut))
        state, loss = update(state, some, classes)
        loss.block_until_ready()

    serve(rows, step, tuned="jit, donated buffers, NHWC")


def _weights(shape: tuple[int, ...], units: tuple[int, ...]) -> Tree:
    draws = np.random.default_rng(0)
    shapes = [(5, 5, shape[-1], 32), (5, 5, 32, 64)]
    inputs = shape[1] // 4 * (shape[2] // 4) * 64
    for outputs in units:
        shapes.append((inputs, outputs))
        inputs = outputs
    return [
        (jnp.asarray(draws.normal(0, 0.05, each), jnp.float32), jnp.zeros(each[-1]))
        for each in shapes
    ]


def _loss(weights: Tree, dtype: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    x = (images / 255 - 0.5).astype(dtype)
    weights = jax.tree.map(lambda each: each.astype(dtype), weights)
    for kernel, bias in weights[:2]:
        sides = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=sides)
        x = jax.nn.relu(x + bias)
        two = (1, 2, 2, 1)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, two, two, "VALID")
    x = x.reshape(x.shape[0], -1)
    for number, (weight, bias) in enumerate(weights[2:], start=3):
        x = x @ weight + bias
        if number < len(weights):
            x = jax.nn.relu(x)
    chances = jax.nn.log_softmax(x.astype(jnp.float32))
    return -jnp.take_along_axis(chances, labels[:, None], 1).mean()


def _update(dtype: Any, state: Tree, images: jax.Array, labels: jax.Array) -> tuple[Tree, Any]:
    """SGD with Nesterov's momentum."""
    weights, momenta = state
    loss, gradients = jax.value_and_grad(_loss)(weights, dtype, images, labels)
    momenta = jax.tree.map(lambda m, g: MOMENTUM * m + g, momenta, gradients)
    weights = jax.tree.map(
        lambda w, m, g: w - RATE * (g + MOMENTUM * m), weights, momenta, gradients
    )
    return (weights, momenta), loss


if __name__ == "__main__":
    run(peer)
