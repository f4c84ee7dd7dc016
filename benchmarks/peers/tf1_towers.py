"""TensorFlow 1's towers, through tf.compat.v1: the graph of the multi-tower tutorials.

Variables are shared, each tower has a CPU device of the process and its part of the batch,
gradients are averaged variable by variable, and one session runs it. The threads are TensorFlow's
own choice, as in the tutorials; with the variant "one thread each" an operator has one.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow.compat.v1 as tf
from arrays import PER_WORKER, arrays, order
from protocol import NotOfferedError, Wanted, run, serve

# of a workload: filters of two 5x5 convolutions, units of the dense layers
NETWORKS = {"seed": ((32, 64), (1024, 10, 10)), "lenet5": ((32, 64), (512, 10))}


def peer(wanted: Wanted) -> None:
    """Train with towers."""
    if wanted.workload not in NETWORKS:
        raise NotOfferedError("the tutorials have no such network")
    tf.disable_eager_execution()
    per_worker = PER_WORKER[wanted.workload]
    images, labels = arrays(wanted.workload)
    images = images.transpose(0, 2, 3, 1)
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        fed_images = tf.placeholder(images.dtype, (None, *images.shape[1:]))
        fed_labels = tf.placeholder(tf.int64, (None,))
        train, loss = _graph(wanted, fed_images, fed_labels)
        one = 1 if "one thread" in wanted.variant else 0  # 0: as many as there are cores
        config = tf.ConfigProto(
            allow_soft_placement=True,
            device_count={"CPU": wanted.workers},
            intra_op_parallelism_threads=one,
            inter_op_parallelism_threads=one * wanted.workers,
        )
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            batches = order(len(images), per_worker * wanted.workers)

            def step() -> None:
                rows = next(batches)
                fed = {fed_images: images[rows], fed_labels: labels[rows]}
                session.run([train, loss], fed)

            serve(per_worker * wanted.workers, step, tuned="NHWC, as TensorFlow's own layout")


def _graph(wanted: Wanted, images: Any, labels: Any) -> tuple[Any, Any]:
    """Return what makes an update, and the last tower's loss."""
    if wanted.workload == "seed":
        optimizer = tf.train.MomentumOptimizer(0.01, 0.9, use_nesterov=True)
    else:
        optimizer = tf.train.AdamOptimizer(1e-3)
    parts = zip(tf.split(images, wanted.workers), tf.split(labels, wanted.workers), strict=True)
    towers = []
    for number, (some, classes) in enumerate(parts):
        with (
            tf.device(f"/cpu:{number}"),
            tf.variable_scope("towers", reuse=number > 0),
            tf.name_scope(f"tower_{number}"),
        ):
            logits = _logits(wanted, some)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)
            loss = tf.reduce_mean(each)
            towers.append(optimizer.compute_gradients(loss))
    averaged = []
    for pairs in zip(*towers, strict=True):
        stacked = tf.concat([tf.expand_dims(gradient, 0) for gradient, _ in pairs], 0)
        averaged.append((tf.reduce_mean(stacked, 0), pairs[0][1]))
    return optimizer.apply_gradients(averaged), loss


def _logits(wanted: Wanted, images: Any) -> Any:
    """The network, its variables on the first CPU; in bf16 it computes with copies of them."""
    dtype = tf.bfloat16 if wanted.precision == "bf16" else tf.float32
    filters, units = NETWORKS[wanted.workload]

    def variable(name: str, shape: tuple[int, ...]) -> Any:
        with tf.device("/cpu:0"):
            made = tf.get_variable(
                name, shape, initializer=tf.truncated_normal_initializer(0, 0.05)
            )
        return tf.cast(made, dtype)

    x = tf.cast(images, dtype)
    if wanted.workload == "seed":
        x = x / 255 - 0.5
    for layer, outputs in enumerate(filters):
        kernel = variable(f"kernel_{layer}", (5, 5, int(x.shape[-1]), outputs))
        x = tf.nn.conv2d(x, kernel, (1, 1, 1, 1), "SAME")
        x = tf.nn.relu(tf.nn.bias_add(x, variable(f"bias_{layer}", (outputs,))))
        x = tf.nn.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    x = tf.reshape(x, (-1, int(x.shape[1] * x.shape[2] * x.shape[3])))
    for layer, outputs in enumerate(units):
        weight = variable(f"weight_{layer}", (int(x.shape[-1]), outputs))
        x = tf.nn.bias_add(tf.matmul(x, weight), variable(f"offset_{layer}", (outputs,)))
        if layer < len(units) - 1:
            x = tf.nn.relu(x)
    return tf.cast(x, tf.float32)


if __name__ == "__main__":
    run(peer)
