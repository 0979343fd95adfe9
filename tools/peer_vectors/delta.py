"""What transformers and mlx-lm compute in the ops of a gated delta net and of an expert router, in f32.

Packages: transformers, torch, mlx[cpu], mlx-lm, numpy, safetensors.

Files:
`gated_delta_rule`: two sequences of T tokens, `q`, `k`, `v`, `log_decay`, `beta`, `state` [2, Hv, Dk, Dv]; and what
came of them, as `recurrent.*` and `chunked.*` (transformers, which scales q by 1 / sqrt(Dk)) and `mlx.*` (mlx-lm,
which takes q scaled and keeps its state [2, Hv, Dv, Dk]): `y` and the last `state`.
`gated_delta_rule_channels`: the same with `log_decay` [2, T, Hv, Dk], by transformers' Kimi-Linear and mlx-lm.
`causal_conv1d`: `x` [T, C], `weight`, `bias`, `state` [C, W-1]; `whole` from no state with SiLU, `update` and
`update_state` from `state` without bias.
`delta_gates`: `a`, `a_log`, `dt_bias` and mlx-lm's `decay`, the exponential of the log decay.
`channel_gates`: the same with channels, `bounded_decay` by Ling 3's formula, and `bound`.
`router_top_k`: `logits` [T, E]; `ids` and `weights` of the 5 best, `normalized` by their sum. Of sigmoids with
`group_bias`, times 2.5: `group_logits`, the best of `one_group` and in 2 of `some_groups`, 6 of them.
"""

import importlib.metadata

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.gated_delta import compute_g, compute_lower_bound_g, gated_delta_ops
from safetensors.numpy import save_file
from transformers import Glm4MoeConfig, Qwen3NextConfig
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next


def arguments(parser):
    pass


def write(folder, options):
    mx.set_default_device(mx.cpu)
    folder.mkdir(parents=True, exist_ok=True)
    packages = ["transformers", "torch", "mlx", "mlx-lm", "numpy"]
    version = {package: importlib.metadata.version(package) for package in packages}
    ops = [gated_delta_rule, gated_delta_rule_channels, causal_conv1d, delta_gates, channel_gates, router_top_k]
    for op in ops:
        arrays = {name: np.ascontiguousarray(array) for name, array in op(np.random.default_rng(5)).items()}
        save_file(arrays, folder / f"{op.__name__}.safetensors", version)


def gated_delta_rule(rng):
    sequences, tokens, key_heads, value_heads, key_dim, value_dim = 2, 70, 2, 6, 10, 12
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    arrays = {
        "q": unit(normal(sequences, tokens, key_heads, key_dim)),
        "k": unit(normal(sequences, tokens, key_heads, key_dim)),
        "v": normal(sequences, tokens, value_heads, value_dim),
        "log_decay": -0.2 * rng.random((sequences, tokens, value_heads), dtype=np.float32),
        "beta": rng.random((sequences, tokens, value_heads), dtype=np.float32),
        "state": normal(sequences, value_heads, key_dim, value_dim),
    }
    q, k, v, log_decay, beta, state = map(torch.from_numpy, arrays.values())
    found = {}
    for name, rule in [
        ("recurrent", qwen3_next.torch_recurrent_gated_delta_rule),
        ("chunked", qwen3_next.torch_chunk_gated_delta_rule),
    ]:
        y, last = rule(q, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True)
        found |= {f"{name}.y": y.numpy(), f"{name}.state": last.numpy()}
    q, k, v, log_decay, beta, state = map(mx.array, arrays.values())
    y, last = gated_delta_ops(q, k, v, mx.exp(log_decay), beta, state.swapaxes(-1, -2))
    return arrays | found | {"mlx.y": np.array(y), "mlx.state": np.array(last)}


def gated_delta_rule_channels(rng):
    sequences, tokens, heads, key_dim, value_dim = 2, 70, 3, 10, 12
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    arrays = {
        "q": unit(normal(sequences, tokens, heads, key_dim)),
        "k": unit(normal(sequences, tokens, heads, key_dim)),
        "v": normal(sequences, tokens, heads, value_dim),
        "log_decay": -0.2 * rng.random((sequences, tokens, heads, key_dim), dtype=np.float32),
        "beta": rng.random((sequences, tokens, heads), dtype=np.float32),
        "state": normal(sequences, heads, key_dim, value_dim),
    }
    q, k, v, log_decay, beta, state = map(torch.from_numpy, arrays.values())
    found = {}
    for name, rule in [
        ("recurrent", kimi_linear.recurrent_kimi_delta_attention),
        ("chunked", kimi_linear.chunk_kimi_delta_attention),
    ]:
        y, last = rule(q, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True)
        found |= {f"{name}.y": y.numpy(), f"{name}.state": last.numpy()}
    q, k, v, log_decay, beta, state = map(mx.array, arrays.values())
    y, last = gated_delta_ops(q, k, v, mx.exp(log_decay), beta, state.swapaxes(-1, -2))
    return arrays | found | {"mlx.y": np.array(y), "mlx.state": np.array(last)}


def causal_conv1d(rng):
    tokens, channels, width = 9, 21, 4
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    arrays = {
        "x": normal(tokens, channels),
        "weight": normal(channels, width),
        "bias": normal(channels),
        "state": normal(channels, width - 1),
    }
    x, weight, bias, state = map(torch.from_numpy, arrays.values())
    x, last = x.T[None], state[None].clone()
    whole = qwen3_next.causal_conv1d_fn(x, weight, bias, activation="silu")
    update = qwen3_next.causal_conv1d_update(x, last, weight, None, activation=None)
    return arrays | {"whole": whole[0].T.numpy(), "update": update[0].T.numpy(), "update_state": last[0].numpy()}


def delta_gates(rng):
    tokens, heads = 40, 6
    arrays = {
        "a": (8 * rng.standard_normal((tokens, heads))).astype(np.float32),
        "a_log": np.log(rng.uniform(0.01, 16, heads)).astype(np.float32),
        "dt_bias": rng.standard_normal(heads, dtype=np.float32),
    }
    a, a_log, dt_bias = map(mx.array, arrays.values())
    return arrays | {"decay": np.array(compute_g(a_log, a, dt_bias))}


def channel_gates(rng):
    tokens, heads, channels, bound = 40, 3, 5, -5.0
    arrays = {
        "a": (8 * rng.standard_normal((tokens, heads, channels))).astype(np.float32),
        "a_log": np.log(rng.uniform(0.01, 16, heads)).astype(np.float32),
        "dt_bias": rng.standard_normal((heads, channels), dtype=np.float32),
    }
    a, a_log, dt_bias = map(mx.array, arrays.values())
    a_log = a_log[:, None]
    decay, bounded = compute_g(a_log, a, dt_bias), compute_lower_bound_g(a_log, a, dt_bias, bound)
    return arrays | {"decay": np.array(decay), "bounded_decay": np.array(bounded), "bound": np.float32([bound])}


def router_top_k(rng):
    tokens, experts, top_k = 30, 37, 5
    logits = (2 * rng.standard_normal((tokens, experts))).astype(np.float32)
    arrays = {"logits": logits}
    for name, normalize in [("weights", False), ("normalized", True)]:
        config = Qwen3NextConfig(
            hidden_size=experts, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=normalize
        )
        router = qwen3_next.Qwen3NextTopKRouter(config)
        router.weight.data = torch.eye(experts)
        _, weights, ids = router(torch.from_numpy(logits))
        arrays |= {name: weights.detach().numpy(), "ids": ids.numpy().astype(np.uint32)}
    return arrays | router_of_sigmoids(rng)


def router_of_sigmoids(rng):
    tokens, experts, top_k = 20, 36, 5
    logits = (2 * rng.standard_normal((tokens, experts))).astype(np.float32)
    bias = (0.3 * rng.standard_normal(experts)).astype(np.float32)
    arrays = {"group_logits": logits, "group_bias": bias}
    for name, groups, chosen in [("one_group", 1, 1), ("some_groups", 6, 2)]:
        config = Glm4MoeConfig(
            hidden_size=experts,
            n_routed_experts=experts,
            num_experts_per_tok=top_k,
            routed_scaling_factor=2.5,
            n_group=groups,
            topk_group=chosen,
        )
        router = glm4_moe.Glm4MoeTopkRouter(config)
        router.weight.data = torch.eye(experts)
        router.e_score_correction_bias.data = torch.from_numpy(bias)
        _, weights, ids = router(torch.from_numpy(logits))
        weights, ids = weights.detach().numpy(), ids.numpy().astype(np.uint32)
        # transformers leaves the order open.
        choices = np.take_along_axis(1 / (1 + np.exp(-logits.astype(float))) + bias, ids.astype(int), axis=1)
        order = np.argsort(-choices, axis=1)
        arrays[f"{name}_ids"] = np.take_along_axis(ids, order, axis=1)
        arrays[f"{name}_weights"] = np.take_along_axis(weights, order, axis=1)
    return arrays
