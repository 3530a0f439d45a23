"""What a user may set: dataclasses that are flags, TOML and arguments at once."""

from kagome.config.fields import at_least
from kagome.config.parallel import (
    Activations,
    Allowed,
    CodecName,
    CrossChunk,
    CutSettings,
    ExchangeSettings,
    MemorySettings,
    Parallel,
    PartialSums,
    Partitioner,
    PipelineSettings,
    Schedule,
    SumCodec,
    default_chunks,
    sends_sums,
)
from kagome.config.settings import Data, Loss, Metric, Model, Report, Run, Train

__all__ = [
    "Activations",
    "Allowed",
    "CodecName",
    "CrossChunk",
    "CutSettings",
    "Data",
    "ExchangeSettings",
    "Loss",
    "MemorySettings",
    "Metric",
    "Model",
    "Parallel",
    "PartialSums",
    "Partitioner",
    "PipelineSettings",
    "Report",
    "Run",
    "Schedule",
    "SumCodec",
    "Train",
    "at_least",
    "default_chunks",
    "sends_sums",
]
