"""A Hugging Face checkpoint in, a quantized folder out."""

from nibblelm.converter.convert import Progress, convert
from nibblelm.converter.report import ConvertReport

__all__ = ["ConvertReport", "Progress", "convert"]
