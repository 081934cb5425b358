"""Builds a `tokenizers.Tokenizer` from tiktoken's ranks, as GLM-4's tokenizer.model has them."""

import base64
import re
from pathlib import Path
from typing import TYPE_CHECKING

from nibblelm.errors import TokenizerError
from nibblelm.tokenizer.detokenizer import byte_of_char
from nibblelm.tokenizer.files import QWEN2_SPLIT, Settings, missing_special

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Qwen2's with up to three digits together (GLM-4's release)
_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|", 1)


def has_ranks(path: Path) -> bool:
    """Whether a tokenizer.model is tiktoken's list of bytes in base64 with their ranks, a token a line."""
    with path.open("rb") as file:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\r?\n?", file.readline(1024)) is not None


def load_ranks(path: Path, settings: Settings) -> "Backend":
    """GLM-4's tokenizer (its published ChatGLM4Tokenizer), the one model that has ranks in a tokenizer.model."""
    try:
        return _backend(path, settings)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises TypeError and others for what it cannot take
        raise TokenizerError(f"{path} cannot be used: {error}") from error


def _backend(path: Path, settings: Settings) -> "Backend":
    """A token is made of any two that there are, so that its ways to be made are merges of its rank."""
    from tokenizers import AddedToken, Regex, decoders, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} has a line that is not a token in base64 and its rank: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise TokenizerError(f"{path} has {len(ranks)} ranks; 0 to one less are expected, with every byte among them")
    char_of_byte = {byte: char for char, byte in byte_of_char().items()}
    text = {token: "".join(map(char_of_byte.__getitem__, token)) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        halves = [(ranks[a], ranks[b], a, b) for a, b in cuts if a in ranks and b in ranks]
        merges += [(text[a], text[b]) for _, _, a, b in sorted(halves)]
    backend = Backend(BPE({text[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    added = [AddedToken(**settings.added[i]) for i in sorted(settings.added)]
    backend.add_tokens([*added, *missing_special(settings, {token.content for token in added})])
    moved = {i: token["content"] for i, token in settings.added.items() if backend.token_to_id(token["content"]) != i}
    if moved:
        raise TokenizerError(f"{path} has {len(ranks)} ranks, behind which added tokens cannot have the ids {moved}")
    opening = ("[gMASK]", "<sop>")
    ids = [(token, backend.token_to_id(token)) for token in opening]
    if any(token_id is None for _, token_id in ids):
        raise TokenizerError(f"{path} has ranks; tokenizer_config.json must name [gMASK] and <sop>, as GLM-4's does")
    backend.post_processor = processors.TemplateProcessing(single=[*opening, "$A"], special_tokens=ids)
    return backend
