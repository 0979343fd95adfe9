"""Weights as other makers store them, and what their own code decodes: one small matrix per method and kind.

Packages: compressed-tensors==0.20.0 (with loguru), transformers, torch, numpy, safetensors; the sources of auto-gptq 0.7.1 and autoawq 0.2.9
(`--auto-gptq` and `--autoawq`: folders that their archives are unpacked in), of which single files are loaded, since
neither package runs with the torch of today.

makers.safetensors: `CASE/PART`, the parts of a module as its checkpoint has them.
makers.json: for each case `quantization_config`, and the SHA-256 of the module's values `[32, 128]` in f32.
"""

import hashlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

torch.set_num_threads(1)
N, K = 32, 128


def arguments(parser):
    parser.add_argument("--auto-gptq", type=Path, required=True)
    parser.add_argument("--autoawq", type=Path, required=True)


def module_at(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scales_of(generator, shape, dtype):
    return (torch.rand(shape, generator=generator) * 0.02 + 0.001).to(dtype)


def compressed_tensors(generator):
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    def integers(low, high, shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int8)

    def config(arguments, form):
        weights = {"num_bits": arguments["num_bits"], "type": "int", "dynamic": False, "actorder": None}
        group = {"targets": ["Linear"], "weights": weights | arguments, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
        }

    cases = {}
    for name, bits, group, dtype, symmetric in [
        ("ct_w4a16", 4, 128, torch.bfloat16, True),
        ("ct_w4g32_f16", 4, 32, torch.float16, True),
        ("ct_w4a16_asym", 4, 64, torch.bfloat16, False),
        ("ct_w8a16_channel", 8, None, torch.float16, True),
        ("ct_w3g32", 3, 32, torch.bfloat16, False),
    ]:
        arguments = {"num_bits": bits, "symmetric": symmetric}
        arguments |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
        low, high = -(1 << (bits - 1)), 1 << (bits - 1)
        groups = K // group if group else 1
        parts = {
            "weight_packed": pack_to_int32(integers(low, high, (N, K)), bits),
            "weight_scale": scales_of(generator, (N, groups), dtype),
            "weight_shape": torch.tensor([N, K]),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack_to_int32(integers(low, high, (N, groups)), bits, packed_dim=0)
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        wide = parts | {"weight_scale": parts["weight_scale"].float()}
        want = PackedQuantizationCompressor.decompress(wide, scheme)["weight"]
        cases[name] = (parts, want, config(arguments, "pack-quantized"))
    arguments = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    parts = {"weight": integers(-128, 128, (N, K)), "weight_scale": scales_of(generator, (N, 1), torch.bfloat16)}
    want = dequantize(parts["weight"], parts["weight_scale"].float(), args=QuantizationArgs(**arguments))
    cases["ct_w8a8"] = (parts, want, config(arguments, "int-quantized"))
    return cases | small_floats(generator)


def small_floats(generator):
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def bytes_of(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    cases = {}
    for name, bits, form, compressor in [
        ("ct_mxfp4", 4, "mxfp4-pack-quantized", MXFP4PackedCompressor),
        ("ct_mxfp8", 8, "mxfp8-quantized", MXFP8QuantizationCompressor),
    ]:
        arguments = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
        weight = {"weight_packed": bytes_of(0, 256, N, K // 2)} if bits == 4 else {"weight": e4m3(bytes_of(0, 256, N, K))}
        parts = weight | {"weight_scale": bytes_of(110, 130, N, K // 32)}
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        want = compressor.decompress(parts, scheme)["weight"].float()
        group = {"targets": ["Linear"], "weights": arguments, "input_activations": None, "format": form}
        config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
        cases[name] = (parts, want, config)
    parts = {"_blocks": bytes_of(0, 256, 2, N // 2, K // 32, 16), "_scales": bytes_of(110, 130, 2, N // 2, K // 32)}
    # Of [E, K, N], as its layers multiply.
    want = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.float32)
    want = want.transpose(1, 2).reshape(N, K)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    cases["gpt_oss"] = (parts, want, config)
    return cases | fp8(bytes_of, generator) | nvfp4(bytes_of, generator)


def fp8(bytes_of, generator):
    from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = e4m3(bytes_of(0, 256, N, K))
    parts = {"weight": weight, "weight_scale_inv": scales_of(generator, (N // 16, K // 64), torch.float32)}
    want = Fp8Dequantize(None)._dequantize_one(weight, parts["weight_scale_inv"], torch.float32)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 64]}
    cases = {"fp8_blocks": (parts, want, config)}
    for name, shape, strategy in [
        ("ct_fp8_channel", (N, 1), {"strategy": "channel"}),
        ("ct_fp8_tensor", (1,), {"strategy": "tensor"}),
        ("ct_fp8_blocks", (N // 16, K // 32), {"strategy": "block", "block_structure": [16, 32]}),
    ]:
        arguments = {"num_bits": 8, "type": "float", "symmetric": True} | strategy
        parts = {"weight": weight, "weight_scale": scales_of(generator, shape, torch.bfloat16)}
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        wide = parts | {"weight_scale": parts["weight_scale"].float()}
        want = FloatQuantizationCompressor.decompress(wide, scheme)["weight"].float()
        activations = {"num_bits": 8, "type": "float", "dynamic": True}
        group = {"targets": ["Linear"], "weights": arguments, "input_activations": activations}
        config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
        cases[name] = (parts, want, config)
    parts = {"weight": weight, "weight_scale": torch.tensor(0.0123), "input_scale": torch.tensor(0.5)}
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    cases["modelopt_fp8"] = (parts, weight.float() * parts["weight_scale"], config)
    return cases


def nvfp4(bytes_of, generator):
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed, scale = bytes_of(0, 256, N, K // 2), e4m3(bytes_of(1, 127, N, K // 16))
    codes = unpack_fp4_from_uint8(packed, N, K, dtype=torch.float32)
    arguments = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    divisor = torch.tensor([2731.5])
    want = dequantize(
        codes, scale.float(), args=QuantizationArgs(**arguments), dtype=torch.float32, global_scale=divisor
    )
    parts = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": arguments | {"dynamic": "local"}}
    form = "nvfp4-pack-quantized"
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    cases = {"ct_nvfp4": (parts | {"input_global_scale": torch.tensor([3.0])}, want, config)}
    factor = torch.tensor(0.000366)
    parts = {"weight": packed, "weight_scale": scale, "weight_scale_2": factor, "input_scale": torch.tensor(0.5)}
    want = codes * (scale.float() * factor).repeat_interleave(16, 1)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    return cases | {"modelopt_nvfp4": (parts, want, config)}


def e4m3(codes):
    """Without the two codes that are no numbers."""
    return torch.where(codes & 127 == 127, codes - 1, codes).view(torch.float8_e4m3fn)


def gptq(generator, folder: Path):
    stub = types.ModuleType("auto_gptq.nn_modules.qlinear")
    stub.GeneralQuantLinear = type("GeneralQuantLinear", (), {})
    for name in ["auto_gptq", "auto_gptq.nn_modules"]:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[stub.__name__] = stub
    path = folder / "auto_gptq" / "nn_modules" / "qlinear" / "qlinear_cuda_old.py"
    layer_class = module_at(path, "qlinear_cuda_old").QuantLinear
    cases = {}
    for name, bits, group, symmetric in [
        ("gptq_4", 4, 128, False),
        ("gptq_4_sym", 4, 64, True),
        ("gptq_8", 8, -1, False),
        ("gptq_3", 3, 32, False),
        ("gptq_2", 2, 64, False),
    ]:
        groups = K // group if group > 0 else 1
        codes = torch.randint(0, 1 << bits, (N, K), generator=generator)
        middle = torch.full((N, groups), 1 << (bits - 1))
        zeros = middle if symmetric else torch.randint(1, 1 << bits, (N, groups), generator=generator)
        scales = scales_of(generator, (N, groups), torch.float16).float()
        layer = layer_class(bits, group, K, N, False)
        linear = torch.nn.Linear(K, N, bias=False)
        spread = [of.repeat_interleave(K // groups, 1) for of in (zeros, scales)]
        linear.weight.data = (codes - spread[0]) * spread[1]
        layer.pack(linear, scales, zeros.float(), None)
        want = layer(torch.eye(K)).T.contiguous()
        assert torch.equal(want, linear.weight.data)
        parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half()}
        parts["g_idx"] = torch.arange(K, dtype=torch.int32) // (K // groups)
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": symmetric}
        cases[name] = (parts, want, config)
        if name == "gptq_4":
            # Version 2 stores zero points as they are.
            second = parts | {"qzeros": parts["qzeros"] + 0x11111111}
            cases["gptq_v2"] = (second, want, config | {"checkpoint_format": "gptq_v2"})
            for packing, parts in [("auto_round:auto_gptq", parts), ("auto_round", second)]:
                auto_round = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 128}
                cases[packing.replace(":", "_")] = (parts, want, auto_round | {"sym": False, "data_type": "int"})
    return cases


def awq(generator, folder: Path):
    packing = module_at(folder / "awq" / "utils" / "packing_utils.py", "packing_utils")

    def packed(values):
        words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
        for nibble, column in enumerate(packing.AWQ_ORDER):
            words |= values[:, column::8] << (4 * nibble)
        return torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32))

    codes = torch.randint(0, 16, (K, N), generator=generator)
    zeros = torch.randint(0, 16, (K // 64, N), generator=generator)
    parts = {"qweight": packed(codes), "qzeros": packed(zeros)}
    parts["scales"] = scales_of(generator, (K // 64, N), torch.float16)
    want = packing.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, 64).T.contiguous()
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    auto_round = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 64}
    return {"awq": (parts, want, config), "auto_round_auto_awq": (parts, want, auto_round)}


def write(folder: Path, options):
    generator = torch.Generator().manual_seed(38)
    cases = compressed_tensors(generator) | gptq(generator, options.auto_gptq) | awq(generator, options.autoawq)
    arrays = {}
    for name, (parts, want, _) in cases.items():
        assert want.dtype == torch.float32 and want.shape == (N, K), name
        for part, array in parts.items():
            arrays[f"{name}/{part}"] = array.clone().contiguous()
    folder.mkdir(exist_ok=True)
    made_by = "compressed-tensors 0.20.0, auto-gptq 0.7.1, autoawq 0.2.9"
    save_file(arrays, folder / "makers.safetensors", metadata={"made_by": made_by})
    digest = lambda want: hashlib.sha256((want + 0.0).contiguous().numpy().tobytes()).hexdigest()
    described = {name: {"config": config, "want": digest(want)} for name, (_, want, config) in cases.items()}
    (folder / "makers.json").write_text(json.dumps(described, indent=1) + "\n")
