"""Which layers of a checkpoint have which layout: one file for each dialect of configs, and their names."""

from __future__ import annotations

from dataclasses import replace

from pellucid.quant.schemes.base import Options, QuantScheme, Rules, StoredConfig, refusal
from pellucid.registry import Registry

HERE = "pellucid.quant.schemes"
SCHEMES: Registry[type[QuantScheme]] = Registry(
    "dialect of quantized checkpoints",
    {
        "awq": f"{HERE}.awq:AwqScheme",
        "gptq": f"{HERE}.gptq:GptqScheme",
        "auto-round": f"{HERE}.gptq:AutoRoundScheme",
        "compressed-tensors": f"{HERE}.compressed_tensors:CompressedTensorsScheme",
        "fp8": f"{HERE}.fp8:Fp8Scheme",
        "fbgemm_fp8": f"{HERE}.fp8:FbgemmScheme",
        "modelopt": f"{HERE}.modelopt:ModelOptScheme",
        "bitsandbytes": f"{HERE}.bitsandbytes:BitsAndBytesScheme",
        "torchao": f"{HERE}.torchao:TorchAoScheme",
        "mxfp4": f"{HERE}.mxfp4:Mxfp4Scheme",
        "hqq": f"{HERE}.hqq:HqqScheme",
        "gguf": f"{HERE}.gguf:GgufScheme",
    },
)
# Other names that checkpoints, vLLM and its users have for them; a kernel's name says nothing of the layout.
ALIASES = {
    "auto_awq": ("awq",),
    "awq_marlin": ("awq",),
    "auto_gptq": ("gptq",),
    "gptq_marlin": ("gptq",),
    "gptq_marlin_24": ("gptq",),
    "gptq_bitblas": ("gptq",),
    "gptq_v2": ("gptq",),
    "marlin": ("gptq",),
    "moe_wna16": ("awq", "gptq"),
    "auto_round": ("auto-round",),
    "inc": ("auto-round",),
    "intel/auto-round": ("auto-round",),
    "compressed_tensors": ("compressed-tensors",),
    "bnb": ("bitsandbytes",),
    "modelopt_fp8": ("modelopt",),
    "modelopt_fp4": ("modelopt",),
    "modelopt_mxfp8": ("modelopt",),
    "modelopt_mixed": ("modelopt",),
    "gpt_oss_mxfp4": ("mxfp4",),
}
# Dialects that are known and not read, and why.
REFUSED = {
    "quark": "its files have layouts of AMD's own",
    "aqlm": "its codebooks need kernels of their own",
    "quip": "its codebooks need kernels of their own",
    "vptq": "its codebooks need kernels of their own",
    "higgs": "its codebooks need kernels of their own",
    "spqr": "its outliers need kernels of their own",
    "fp_quant": "its activations are rotated",
    "eetq": "its weights lie in an order of CUDA kernels",
    "bitnet": "its layers round activations in a way of their own",
}
INSTEAD = "use a checkpoint in another format, such as compressed-tensors, AWQ, GPTQ or GGUF"


def rules_of(stored: StoredConfig, asked: str | None = None) -> Rules | None:
    """How each layer of a checkpoint is stored; None: nothing says that any is quantized.

    asked: the dialect that the user names, which must be the checkpoint's.  Raises ValueError, naming the
    value, the reason and the way out, for what cannot be read.
    """
    options = stored.quantization
    if options is None:
        return None
    method = method_of(options)
    if asked is not None and method not in scheme_names(asked):
        raise ValueError(
            f"quantization is {asked!r}, but the checkpoint is stored as {method!r}; leave quantization out"
        )
    if method in REFUSED:
        raise refusal(f"{method!r}", REFUSED[method], INSTEAD)
    if method not in SCHEMES:
        raise refusal(f"{method!r}", f"there are {', '.join(SCHEMES)}", INSTEAD)
    return replace(SCHEMES.load(method)().rules(stored, options), spellings=stored.spellings)


def method_of(options: Options) -> str:
    """The dialect of a config, by its name in SCHEMES if it is there; other files may not say."""
    name = options.text("quant_method", "method").lower()
    if not name:
        if options.has("quant_algo", "quantized_layers"):
            name = "modelopt"
        elif options.has("w_bit", "version", "zero_point"):
            name = "awq"
        elif options.has("bits"):
            name = "gptq"
        else:
            raise ValueError(
                f"quant_method is missing in {options.where}; add the one that made the checkpoint"
            )
    return scheme_names(name)[0]


def scheme_names(name: str) -> tuple[str, ...]:
    """The dialects that a name may mean."""
    return ALIASES.get(name.lower(), (name.lower(),))
