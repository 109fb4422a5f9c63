"""A byte-level transformer in flax nnx, and sampling from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_ring.gradients import save_all_but_gathered
from language_model.config import Config
from language_model.data import VOCABULARY

TEMPERATURE = 0.7

# Shards of parameters to the parameters.
Gather = Callable[[nnx.State], nnx.State]


class Block(nnx.Module):
    """Causal self-attention and a two-layer perceptron, each added to the residual stream."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        """Allocates the parameters."""
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.heads = heads
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, time, width] to the same shape."""
        x = x + self._attend(shift_half(self.attention_norm(x)))
        hidden = self.up(shift_half(self.mlp_norm(x)))
        return x + self.down(jax.nn.relu(hidden) ** 2)

    def _attend(self, x: jax.Array) -> jax.Array:
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = rotate(qkv[:, :, 0]), rotate(qkv[:, :, 1]), qkv[:, :, 2]
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Transformer(nnx.Module):
    """Bytes in, logits of the next byte out; input and output share one embedding."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        """Allocates the parameters."""
        small = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(VOCABULARY, config.width, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List(
            [Block(config.width, config.heads, rngs=rngs) for _ in range(config.layers)]
        )
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array, gather: Gather | None = None) -> jax.Array:
        """Maps int [batch, time] to logits [batch, time, 256].

        With `gather` the parameters are shards: each block's are gathered where it is used, and
        again in the backward pass. The embedding, used at both ends, is whole throughout.
        """
        embed, norm = self.embed, self.norm
        if gather is not None:
            embed, norm = _gathered(embed, gather), _gathered(norm, gather)
        x = embed(tokens)
        if gather is not None:
            x = _apply_gathered(self.blocks, x, gather)
        else:
            for block in self.blocks:
                x = block(x)
        return embed.attend(norm(x))


def _gathered(module: nnx.Module, gather: Gather) -> nnx.Module:
    graph, shards = nnx.split(module)
    return nnx.merge(graph, gather(shards))


def _apply_gathered(blocks: Sequence[Block], x: jax.Array, gather: Gather) -> jax.Array:
    """Goes through the blocks in a loop, whose body gathers the parameters of one.

    Without a loop a compiler may notice that the backward pass gathers what forward has gathered
    before, and keep that instead.
    """
    graph, _ = nnx.split(blocks[0])
    stack = jax.tree.map(lambda *shards: jnp.stack(shards), *map(nnx.state, blocks))

    def apply(x: jax.Array, shards: nnx.State) -> tuple[jax.Array, None]:
        return nnx.merge(graph, gather(shards))(x), None

    if len(blocks) > 1:
        apply = jax.checkpoint(apply, policy=save_all_but_gathered, prevent_cse=False)
    return jax.lax.scan(apply, x, stack)[0]


def shift_half(x: jax.Array) -> jax.Array:
    """Takes half of the features from the byte before: a small model learns much faster so."""
    half = x.shape[-1] // 2
    before = jnp.pad(x[:, :-1, half:], ((0, 0), (1, 0), (0, 0)))
    return jnp.concatenate([x[..., :half], before], axis=-1)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of queries or keys [batch, time, heads, features]."""
    half = x.shape[-1] // 2
    frequency = 1000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def init_model(config: Config) -> tuple[nnx.GraphDef[Transformer], nnx.State]:
    """The model's structure and its initial parameters, a pytree."""
    return nnx.split(Transformer(config, rngs=nnx.Rngs(config.seed)))


def bits_per_byte(
    graph: nnx.GraphDef[Transformer],
    params: nnx.State,
    windows: jax.Array,
    gather: Gather | None = None,
) -> jax.Array:
    """Mean cross-entropy in bits of all bytes but the first of each window [batch, time + 1]."""
    tokens = windows.astype(jnp.int32)
    logits = nnx.merge(graph, params)(tokens[:, :-1], gather)
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean() / np.log(2)


def generate(
    graph: nnx.GraphDef[Transformer], params: nnx.State, prompt: bytes, config: Config
) -> bytes:
    """Continues the prompt by `sample_bytes` bytes, drawn at a fixed temperature."""
    step = _make_sampler(graph)
    context = np.zeros(config.window, np.int32)
    context[: len(prompt)] = list(prompt)
    end, tokens, key = len(prompt), jnp.asarray(context), jax.random.key(config.seed)
    text = bytearray(prompt)
    for _ in range(config.sample_bytes):
        key, draw = jax.random.split(key)
        tokens, byte = step(params, tokens, end, draw)
        end = min(end + 1, config.window)
        text.append(int(byte))
    return bytes(text)


def _make_sampler(graph: nnx.GraphDef[Transformer]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """One compiled step for any length: the window has a fixed shape, `end` says how full it is."""

    def step(
        params: nnx.State, tokens: jax.Array, end: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graph, params)(tokens[None])[0, end - 1]
        byte = jax.random.categorical(key, logits / TEMPERATURE)
        full = end == tokens.shape[0]
        # A full window slides by one byte to make room.
        tokens = jnp.where(full, jnp.roll(tokens, -1), tokens)
        return tokens.at[jnp.where(full, end - 1, end)].set(byte), byte

    return jax.jit(step)
