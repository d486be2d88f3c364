"""Addition as translation by LSTMs in flax linen, as seq2seq's: `nn.scan` over a decoder that samples."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from scripts import Script, half_optimizer

import jmp_train as jt

VOCAB, HIDDEN, EOS = 14, 32, 1


class DecoderCell(nn.Module):
    teacher_force: bool

    @nn.compact
    def __call__(self, carry: Any, x: jax.Array) -> tuple[Any, Any]:
        lstm_state, last = carry
        x = x if self.teacher_force else last
        lstm_state, y = nn.LSTMCell(HIDDEN)(lstm_state, x)
        logits = nn.Dense(VOCAB)(y)
        token = jax.random.categorical(self.make_rng("lstm"), logits)
        prediction = jax.nn.one_hot(token, VOCAB)
        return (lstm_state, prediction), (logits, prediction)


class Seq2seq(nn.Module):
    teacher_force: bool = True

    @nn.compact
    def __call__(self, encoder_inputs: jax.Array, decoder_inputs: jax.Array) -> Any:
        lengths = jnp.argmax(jnp.argmax(encoder_inputs, -1) == EOS, -1) + 1
        encoder: Any = nn.RNN(nn.LSTMCell(HIDDEN), return_carry=True, name="encoder")
        state, _ = encoder(encoder_inputs, seq_lengths=lengths)
        decoder: Any = nn.scan(
            DecoderCell,
            variable_broadcast="params",
            split_rngs={"params": False, "lstm": True},
            in_axes=1,
            out_axes=1,
        )(self.teacher_force, name="decoder")
        _, outputs = decoder((state, decoder_inputs[:, 0]), decoder_inputs[:, :-1])
        return outputs


MODEL = Seq2seq()


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    lengths = jnp.argmax(jnp.argmax(labels, -1) == EOS, -1) + 1
    mask = jnp.arange(labels.shape[1])[None] < lengths[:, None]
    xe = jnp.sum(nn.log_softmax(logits) * labels, -1)
    return -jnp.mean(jnp.sum(jnp.where(mask, xe, 0), -1) / lengths)


def loss_fn(params: Any, batch: Any, lstm_key: Any) -> jax.Array:
    logits, _ = MODEL.apply({"params": params}, batch["query"], batch["answer"], rngs={"lstm": lstm_key})
    return cross_entropy(logits, batch["answer"][:, 1:])


def additions() -> dict[str, jax.Array]:
    symbols = "#|0123456789+="

    def one_hot(text: str, length: int) -> np.ndarray:
        ids = [symbols.index(s) for s in text] + [EOS]
        return np.eye(VOCAB, dtype=np.float32)[ids + [0] * (length - len(ids))]

    pairs = np.random.default_rng(0).integers(0, 100, (16, 2))
    return {
        "query": jnp.asarray([one_hot(f"{a}+{b}", 7) for a, b in pairs]),
        "answer": jnp.asarray([one_hot(f"={a + b}", 6) for a, b in pairs]),
    }


@functools.cache
def script(half: bool) -> Script:
    batch, key = additions(), jax.random.PRNGKey(0)
    params = jax.jit(MODEL.init)({"params": key, "lstm": key}, *batch.values())["params"]
    tx = half_optimizer(optax.adam(1e-2), half)
    state = train_state.TrainState.create(apply_fn=MODEL.apply, params=params, tx=tx)

    @jax.jit
    def train_step(state: Any, batch: Any) -> Any:
        lstm_key = jax.random.fold_in(key, state.step)
        if half:
            half_loss, scale = jt.autocast(loss_fn), jt.get_loss_scale(state.opt_state)
            scaled_loss = lambda *args: scale.scale(half_loss(*args))
            scaled, grads = jax.value_and_grad(scaled_loss)(state.params, batch, lstm_key)
            loss = scale.unscale(scaled)
        else:
            loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, lstm_key)
        return state.apply_gradients(grads=grads), loss

    return Script(state, train_step, batch)


def loss_args() -> tuple[Any, ...]:
    return script(True).state.params, additions(), jax.random.PRNGKey(0)
