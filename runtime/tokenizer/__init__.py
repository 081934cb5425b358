"""Text in and out: tokenizers, chat templates, incremental detokenization."""

from nibblelm.tokenizer.tokenizer import TextStream, Tokenizer, load_tokenizer

__all__ = ["TextStream", "Tokenizer", "load_tokenizer"]
