#!/usr/bin/env python3
"""Times peers on the shapes that `lowbit bench` times, in one run on one GPU, and prints them side by side.

    cargo build --release --features cuda
    pip install 'mlx[cuda13]' torch flash-linear-attention
    tools/bench_peers.py [--lowbit target/release/lowbit] [WORD ..]

A peer that is not installed is named and left out. Medians in microseconds; weights are cold: every call takes the
copy that was used longest ago, of more copies than the cache holds."""
import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time

COLD = 400 << 20
# As lowbit's own: what takes more power than a GPU may draw slows down after some milliseconds.
RUNS, SECONDS = 15, 0.3
FORMAT, BITS, GROUP = "affine4g64", 4, 64


def copies(size):
    return COLD // size + 2


def median(run):
    """The median of the times that `run` returns, called as often and for as long as `lowbit bench` calls its cases."""
    times, begin = [], time.perf_counter()
    while len(times) < RUNS or time.perf_counter() - begin < SECONDS:
        times.append(run())
    return statistics.median(times)


class Torch:
    """cuBLAS in bf16, and torch's 4-bit product where it has one."""

    name = "torch"

    def __init__(self):
        self.torch = importlib.import_module("torch")
        if not self.torch.cuda.is_available():
            raise ImportError("torch finds no CUDA device")

    def timed(self, calls):
        """The median time of a call: graph replays of all calls in turn, by the device's clock."""
        torch = self.torch
        calls = calls * -(-RUNS // len(calls))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls[:3]:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return median(lambda: self.elapsed(graph.replay)) / len(calls)

    def elapsed(self, run):
        """The device's time for what `run` queues."""
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def cublas_bf16(self, m, k, n):
        torch = self.torch
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies(2 * n * k))]
        return self.timed([lambda w=w: torch.nn.functional.linear(x, w) for w in weights])

    def tinygemm(self, m, k, n):
        torch = self.torch
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        packed = []
        for _ in range(copies(n * k // 2)):
            codes = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
            scales = torch.randn(k // GROUP, n, 2, device="cuda", dtype=torch.bfloat16)
            packed.append((torch._convert_weight_to_int4pack(codes, 8), scales))
        return self.timed([lambda w=w, s=s: torch._weight_int4pack_mm(x, w, GROUP, s) for w, s in packed])


class Mlx:
    """MLX on CUDA. Its calls are queued and evaluated together, so that the host's time is hidden."""

    name = "mlx"

    def __init__(self):
        self.mx = importlib.import_module("mlx.core")
        if self.mx.default_device() != self.mx.gpu:
            raise ImportError("mlx runs on the CPU here")

    def timed(self, calls):
        calls = calls * -(-RUNS // len(calls))
        self.mx.eval([call() for call in calls])

        def evaluate():
            start = time.perf_counter()
            self.mx.eval([call() for call in calls])
            return (time.perf_counter() - start) * 1e6 / len(calls)

        return median(evaluate)

    def quantized(self, shape):
        mx = self.mx
        return mx.quantize(mx.random.normal(shape).astype(mx.float16), group_size=GROUP, bits=BITS)

    def quantized_matmul(self, m, k, n):
        mx = self.mx
        x = mx.random.normal((m, k)).astype(mx.float16)
        weights = [self.quantized((n, k)) for _ in range(copies(n * k // 2))]
        mx.eval(x, weights)
        product = lambda w: mx.quantized_matmul(x, *w, transpose=True, group_size=GROUP, bits=BITS)
        return self.timed([lambda w=w: product(w) for w in weights])

    def gather_qmm(self, tokens, experts, top_k, k, n):
        mx = self.mx
        x = mx.random.normal((tokens, 1, 1, k)).astype(mx.float16)
        weights = [self.quantized((experts, n, k)) for _ in range(copies(experts * n * k // 2))]
        ids = mx.random.randint(0, experts, (tokens, top_k)).astype(mx.uint32)
        mx.eval(x, weights, ids)
        product = lambda w: mx.gather_qmm(x, *w, rhs_indices=ids, transpose=True, group_size=GROUP, bits=BITS)
        return self.timed([lambda w=w: product(w) for w in weights])


class Fla:
    """flash-linear-attention's Triton kernels, called as from a model."""

    name = "fla"

    def __init__(self):
        self.torch = Torch()
        self.ops = importlib.import_module("fla.ops.gated_delta_rule")

    def gated_delta_rule(self, tokens, key_heads, value_heads, dim):
        torch = self.torch.torch
        make = lambda heads: torch.randn(1, tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
        # Its kernels want as many key heads as value heads.
        q, k = (torch.nn.functional.normalize(make(value_heads), dim=-1) for _ in range(2))
        v = make(value_heads)
        gates = torch.rand(2, 1, tokens, value_heads, device="cuda")
        state = torch.zeros(1, value_heads, dim, dim, device="cuda")
        call = lambda: self.ops.chunk_gated_delta_rule(
            q, k, v, -gates[0], gates[1], initial_state=state, output_final_state=True
        )
        for _ in range(3):
            call()
        return median(lambda: self.torch.elapsed(call))


def cases():
    """The op, its shape as `lowbit bench` names it, its format, and the peers' calls."""
    layers = [(4096, 14336), (14336, 4096), (8192, 28672)]
    for m in [1, 8, 16, 64, 512, 4096]:
        for k, n in layers if m == 1 else layers[:1]:
            peers = {"mlx": ("quantized_matmul", (m, k, n)), "cublas bf16": ("cublas_bf16", (m, k, n))}
            if m == 1:
                peers["tinygemm"] = ("tinygemm", (m, k, n))
            yield "quantized_matmul", f"M={m} K={k} N={n}", FORMAT, peers
    for tokens in [1, 64, 512]:
        shape = f"T={tokens} K=2048 N=512 E=256 top_k=8"
        yield "gather_qmm", shape, FORMAT, {"mlx": ("gather_qmm", (tokens, 256, 8, 2048, 512))}
    for tokens in [2048, 8192, 32768]:
        shape = f"S=1 T={tokens} Hk=16 Hv=32 D=128"
        yield "gated_delta_rule", shape, "-", {"fla": ("gated_delta_rule", (tokens, 16, 32, 128))}


PROVIDERS = {"mlx": Mlx, "cublas bf16": Torch, "tinygemm": Torch, "fla": Fla}


def installed():
    found = {}
    for kind in set(PROVIDERS.values()):
        try:
            found[kind] = kind()
        except ImportError as error:
            print(f"without {kind.name}: {error}", file=sys.stderr)
    return found


def ours(program, op, format):
    """What `lowbit bench` measures of an op and a format, by shape."""
    words = [op] if format == "-" else [op, format]
    command = [program, "bench", *words, "--device", "cuda", "--json"]
    rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    best = {}
    for row in rows["rows"]:
        best[row["shape"]] = min(row["median_us"], best.get(row["shape"], float("inf")))
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowbit", default="target/release/lowbit")
    parser.add_argument("words", nargs="*", help="only cases whose line has all of these")
    arguments = parser.parse_args()
    peers, measured = installed(), {}
    columns = list(PROVIDERS)
    print(f"{'op':<18} {'shape':<36} {'format':<11} {'lowbit':>9}" + "".join(f"{name:>13}" for name in columns))
    for op, shape, format, calls in cases():
        line = f"{op} {shape} {format}"
        if not all(word in line for word in arguments.words):
            continue
        if (op, format) not in measured:
            measured[op, format] = ours(arguments.lowbit, op, format)
        row = f"{op:<18} {shape:<36} {format:<11} {measured[op, format].get(shape, float('nan')):>9.1f}"
        for name in columns:
            peer = peers.get(PROVIDERS[name])
            if name not in calls or peer is None:
                row += f"{'-':>13}"
                continue
            method, sizes = calls[name]
            row += f"{getattr(peer, method)(*sizes):>13.1f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
