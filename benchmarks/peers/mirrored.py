"""TensorFlow's MirroredStrategy on logical CPU devices of one process, with a Keras model."""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import tensorflow as tf
from arrays import PER_WORKER, arrays
from protocol import NotOfferedError, Wanted, run, serve

# of a workload: units of the dense layers behind two 5x5 convolutions of 32 and 64 filters
NETWORKS = {"seed": (1024, 10, 10), "lenet5": (512, 10)}


def peer(wanted: Wanted) -> None:
    """Train by MirroredStrategy."""
    if wanted.workload not in NETWORKS:
        raise NotOfferedError("not written for it")
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * wanted.workers
    tf.config.set_logical_device_configuration(cpu, devices)
    if wanted.precision == "bf16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    names = [f"/cpu:{number}" for number in range(wanted.workers)]
    strategy = tf.distribute.MirroredStrategy(names)
    rows = PER_WORKER[wanted.workload] * wanted.workers
    images, labels = arrays(wanted.workload)
    data = tf.data.Dataset.from_tensor_slices((images.transpose(0, 2, 3, 1), labels))
    data = data.cache().shuffle(len(images)).repeat().batch(rows).prefetch(2)
    with strategy.scope():
        model = _network(wanted, images.shape)
        if wanted.workload == "seed":
            optimizer = keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True)
        else:
            optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)

    def shard(some: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(some, training=True)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits)
            loss = tf.reduce_sum(each) / rows
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def update(batch: object) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(shard, batch), axis=None)

    batches = iter(strategy.experimental_distribute_dataset(data))
    serve(rows, lambda: float(update(next(batches))), tuned="tf.function, NHWC, tf.data")


def _network(wanted: Wanted, shape: tuple[int, ...]) -> keras.Model:
    def convolution(filters: int) -> list[keras.layers.Layer]:
        layer = keras.layers.Conv2D(filters, 5, padding="same", activation="relu")
        return [layer, keras.layers.MaxPool2D()]

    *hidden, last = NETWORKS[wanted.workload]
    return keras.Sequential(
        [
            keras.layers.Input((*shape[2:], shape[1])),
            *([keras.layers.Rescaling(1 / 255, -0.5)] if wanted.workload == "seed" else []),
            *(*convolution(32), *convolution(64), keras.layers.Flatten()),
            *(keras.layers.Dense(units, activation="relu") for units in hidden),
            keras.layers.Dense(last, dtype="float32"),
        ]
    )


if __name__ == "__main__":
    run(peer)
