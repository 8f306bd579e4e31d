"""gpt-oss' dialect: experts in MXFP4, and nothing else."""

from __future__ import annotations

from pellucid.quant.codes import E2M1, Group
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.schemes.base import EVERYTHING, Options, QuantScheme, Rule, Rules, StoredConfig, plain


class Mxfp4Scheme(QuantScheme):
    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        format = LayerFormat(layout="mx-experts", code=E2M1, group=Group(1, 32))
        left = plain(options.names("modules_to_not_convert"))
        return Rules((*left, Rule(EVERYTHING, format, frozenset({"experts"}))))
