"""How MLX and ggml encode and decode each weight format.

Packages: mlx[cpu], gguf, numpy. ggml's quantisers are called in its own library, built from the source
that llama-cpp-python's sdist on PyPI carries:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF
    cmake --build build --target ggml-base

The gguf package, where it has the format, must agree with the library (but for zeros' signs).

Files: `values` holds the rows that every format encodes. `affine` holds, for each bits, group size and dtype,
`{bits}.{group_size}.{dtype}.{component}`, the rows encoded after a cast to dtype; an MLX mode's file `{dtype}.{component}`;
ggml's files `weight` and `decoded`. `random.*` are random bytes and what they decode to, `large.*` encoded rows that f16
cannot hold.
"""

import ctypes
import importlib.metadata

import gguf
import mlx.core as mx
import numpy as np

FLOATS = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
AFFINE_BITS = [2, 3, 4, 5, 6, 8]
AFFINE_GROUPS = [32, 64, 128]
# Mode: bits, group size.
MLX_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
GGML_TYPES = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 NVFP4 TQ1_0 TQ2_0 Q1_0 Q2_0".split()
)
# lowbit reads them, and does not write them: their encoders want an importance matrix.
ONLY_READ = "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S".split()
# Random blocks of 32 values; a superblock counts as 8. MXFP4 and NVFP4 show each of their 256 scales.
RANDOM_BLOCKS = 96


def arguments(parser):
    parser.add_argument("--ggml", required=True, help="path of libggml-base.so (or .dylib)")


def write(folder, options):
    folder.mkdir(parents=True, exist_ok=True)
    rows = values()
    versions = {package: importlib.metadata.version(package) for package in ["mlx", "gguf", "numpy"]}

    def save(name, arrays, source):
        metadata = {"source": source, **versions}
        arrays = {key: mx.array(array) for key, array in arrays.items()}
        mx.save_safetensors(str(folder / f"{name}.safetensors"), arrays, metadata)

    save("values", {"values": rows, "large": large_values()}, "numpy")
    save("affine", affine(rows), "mlx")
    for mode in MLX_MODES:
        save(mode, mlx_mode(mode, rows), "mlx")
    save("global_scale", global_scale(), "mlx, gguf")
    library = Ggml(options.ggml)
    for name in GGML_TYPES + ONLY_READ:
        save(name, ggml_type(library, name, rows), f"ggml {library.version}, as in llama-cpp-python 0.3.36")


def values():
    """[R, 256] f32: what weights look like, and what they should not. All fit in f16."""
    rng = np.random.default_rng(2)
    normal = lambda: rng.standard_normal(256)
    ramp = np.arange(256.0)
    spike = np.zeros(256)
    spike[77] = 3.0
    # Every 16 values another magnitude, so that the sub-blocks' scales spread over all their codes.
    spread = normal() * 10.0 ** np.repeat(rng.uniform(-5, 2, 16), 16)
    rows = [
        normal(),
        normal() * 0.02,
        normal() * 1e-3,
        normal() * 1e3,
        normal() ** 3,
        spread,
        normal() * (rng.random(256) < 0.05),
        np.where(ramp % 64 < 32, 0, normal()),
        -1 - np.abs(normal()),
        5 + 0.1 * normal(),
        np.full(256, 0.7),
        np.full(256, -0.7),
        np.zeros(256),
        np.where(ramp % 2 == 0, 0.0, -0.0),
        spike,
        -spike,
        (ramp % 31 - 15) * 0.5,
        (ramp % 16) / 15,
        np.sign(normal()) * 2.0 ** rng.integers(-12, 12, 256),
        normal() * 1e-7,
        normal() * 1e-12,
        normal() * 1e-40,
        rng.uniform(-6e4, 6e4, 256),
    ]
    return np.array(rows, np.float32)


def large_values():
    """[2, 256] f32 that f16 cannot hold."""
    rng = np.random.default_rng(3)
    return (rng.standard_normal((2, 256)) * [[1e8], [1e30]]).astype(np.float32)


def affine(rows):
    arrays = {}
    for bits in AFFINE_BITS:
        for group_size in AFFINE_GROUPS:
            how = dict(group_size=group_size, bits=bits)
            for dtype, float_type in FLOATS.items():
                encoded = mx.quantize(mx.array(rows).astype(float_type), **how)
                for component, array in zip(["weight", "scales", "biases"], encoded):
                    arrays[f"{bits}.{group_size}.{dtype}.{component}"] = array
        arrays |= affine_decoded(bits, rows)
        encoded = mx.quantize(mx.array(large_values()), group_size=64, bits=bits)
        for component, array in zip(["weight", "scales", "biases"], encoded):
            arrays[f"large.{bits}.64.f32.{component}"] = array
    return arrays


def affine_decoded(bits, rows):
    """Random codes, scales and biases; and the encoded rows."""
    rng = np.random.default_rng(bits)
    arrays = {}
    for group_size in AFFINE_GROUPS:
        name = f"random.{bits}.{group_size}"
        weight = arrays[f"{name}.weight"] = rng.integers(0, 2**32, (2, 256 * bits // 32), np.uint32)
        scales, biases = rng.standard_normal((2, 2, 256 // group_size)).astype(np.float32)
        for dtype in FLOATS if group_size == 64 else ["f32"]:
            parts = mx.array(weight), *(mx.array(part).astype(FLOATS[dtype]) for part in [scales, biases])
            decoded = mx.dequantize(*parts, group_size=group_size, bits=bits)
            for component, array in zip(["scales", "biases", "decoded"], [*parts[1:], decoded]):
                arrays[f"{name}.{dtype}.{component}"] = array
    if bits in [3, 4]:
        encoded = mx.quantize(mx.array(rows), group_size=64, bits=bits)
        arrays[f"{bits}.64.f32.decoded"] = mx.dequantize(*encoded, group_size=64, bits=bits)
    return arrays


def mlx_mode(mode, rows):
    bits, group_size = MLX_MODES[mode]
    arrays = {}
    for dtype, float_type in FLOATS.items():
        weight, scales = mx.quantize(mx.array(rows).astype(float_type), mode=mode)
        arrays[f"{dtype}.weight"], arrays[f"{dtype}.scales"] = weight, scales
        if dtype != "f16":
            weight, scales = mx.quantize(mx.array(large_values()).astype(float_type), mode=mode)
            arrays[f"large.{dtype}.weight"], arrays[f"large.{dtype}.scales"] = weight, scales
    # A group for each scale; a mode of 8 bits shows each code too.
    rng = np.random.default_rng(bits)
    weight = mx.array(rng.integers(0, 2**32, (16, group_size * bits // 2), np.uint32))
    scales = mx.array(np.arange(256, dtype=np.uint8).reshape(16, 16))
    arrays["random.weight"], arrays["random.scales"] = weight, scales
    for dtype, float_type in FLOATS.items():
        arrays[f"random.{dtype}.decoded"] = mx.dequantize(weight, scales, mode=mode, dtype=float_type)
    return arrays


def global_scale():
    """nvfp4 with a float per matrix: MLX's tensors of three experts, and the same codes and scales in ggml's blocks."""
    rng = np.random.default_rng(4)
    rows = (rng.standard_normal((3, 5, 128)) * [[[0.02]], [[1.0]], [[0.003]]]).astype(np.float32)
    factors = np.abs(rows).max(axis=(1, 2))
    experts = [mx.quantize(mx.array(w), mode="nvfp4", global_scale=mx.array(f)) for w, f in zip(rows, factors)]
    weight, scales = (np.stack([np.array(part) for part in parts]) for parts in zip(*experts))
    decoded = [
        mx.dequantize(*expert, mode="nvfp4", global_scale=mx.array(f), dtype=mx.float32)
        for expert, f in zip(experts, factors)
    ]
    codes = weight.view(np.uint8)
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(3, 5, 2, 4, 2, 8)
    packed = (codes[..., 0, :] | codes[..., 1, :] << 4).reshape(3, 5, 2, 32)
    blocks = np.concatenate([scales.reshape(3, 5, 2, 4), packed], axis=-1).reshape(3, 5, 72)
    return {
        "weight": weight,
        "scales": scales,
        "global_scale": factors,
        "decoded": np.stack([np.array(matrix) for matrix in decoded]),
        "blocks": blocks,
        "blocks.decoded": gguf.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4),
    }


class Ggml:
    """ggml's quantisers, as llama-quantize calls them without an importance matrix, and its decoders."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.ggml_version.restype = ctypes.c_char_p
        self.version = self.library.ggml_version().decode()

    def encode(self, name, rows):
        block, size = sizes(name)
        out = np.zeros((rows.shape[0], rows.shape[1] // block * size), np.uint8)
        self._call(f"quantize_{function(name)}", rows, out, *map(ctypes.c_int64, rows.shape), None)
        return out

    def decode(self, name, data):
        block, size = sizes(name)
        out = np.full((data.shape[0], data.shape[1] // size * block), np.nan, np.float32)
        self._call(f"dequantize_row_{function(name)}", data, out, ctypes.c_int64(out.size))
        return out

    def _call(self, function, source, destination, *rest):
        source = np.ascontiguousarray(source)
        getattr(self.library, function)(
            source.ctypes.data_as(ctypes.c_void_p), destination.ctypes.data_as(ctypes.c_void_p), *rest
        )


def function(name):
    """ggml's functions are lower-case but for K-quants' K."""
    return name.lower().replace("_k", "_K")


def sizes(name):
    """Values and bytes per block. gguf 0.19 does not know Q2_0."""
    return (64, 18) if name == "Q2_0" else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def ggml_type(library, name, rows):
    rng = np.random.default_rng(len(name))
    block, size = sizes(name)
    blocks = {"MXFP4": 256, "NVFP4": 64}.get(name, RANDOM_BLOCKS * 32 // block)
    # So that most points of their grids occur.
    blocks *= 4 if name in ONLY_READ else 1
    random = rng.integers(0, 256, (4, blocks // 4, size), np.uint8)
    if name == "MXFP4":
        random[..., 0] = np.arange(256).reshape(4, -1)
    if name == "NVFP4":
        random[..., :4] = np.arange(256).reshape(4, 16, 4)
    random = random.reshape(4, -1)
    arrays = {"random.weight": random, "random.decoded": library.decode(name, random)}
    if name not in ONLY_READ:
        encoded = library.encode(name, rows)
        arrays |= {"weight": encoded, "decoded": library.decode(name, encoded)}
    # gguf 0.19 has no code for these.
    if name not in ["Q1_0", "Q2_0"]:
        check_with_gguf(name, rows, arrays)
    return arrays


def check_with_gguf(name, rows, arrays):
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        for prefix in ["random."] if name in ONLY_READ else ["", "random."]:
            decoded = gguf.dequantize(arrays[f"{prefix}weight"], kind)
            np.testing.assert_array_equal(decoded, arrays[f"{prefix}decoded"], err_msg=name)
        if name in ONLY_READ:
            return
        try:
            encoded = gguf.quantize(rows, kind)
        except NotImplementedError:
            return
    # They differ in the sign of zero scales.
    np.testing.assert_array_equal(gguf.dequantize(encoded, kind), arrays["decoded"], err_msg=name)
