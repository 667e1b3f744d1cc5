"""SentencePiece vocabularies in GGUF files (`tokenizer.ggml.model` llama): Llama 2, Mistral 7B."""

from collections.abc import Mapping

from tokenizers import Tokenizer, decoders, models, normalizers

from weir.model.errors import ModelError
from weir.model.files.gguf import GgufFile
from weir.model.tokens.gguf_vocabulary import Vocabulary
from weir.model.tokens.spelling import SPACE_MARK


def sentencepiece_from_gguf(gguf: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    """BPE by scores, single bytes for what the vocabulary lacks; a space before the text unless the file says no.

    Raises:
        ModelError: `tokenizer.ggml.scores` does not fit the tokens.
    """
    scores = _scores(gguf, len(vocabulary.tokens))
    unknown_id = gguf.find("tokenizer.ggml.unknown_token_id", int, 0) or 0
    model = models.BPE(
        vocab=dict(vocabulary.id_of),
        merges=merges_by_score(dict(zip(vocabulary.tokens, scores, strict=True))),
        unk_token=vocabulary.token("tokenizer.ggml.unknown_token_id", unknown_id),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE_MARK)
    plain = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.find("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces])
        tokenizer.decoder = decoders.Sequence([*plain, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(plain)
    return tokenizer


def merges_by_score(score_of: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pairs that make a token, best token first.

    SentencePiece joins the neighbours whose join has the best score. BPE joins by the rank of the pair: ranked by the
    score of what they make, and pairs of one token by their parts' places in `score_of`, both come to the same (as
    transformers' conversion of Llama's tokenizer has it).
    """
    place_of = {token: place for place, token in enumerate(score_of)}
    ranked = []
    for token, score in score_of.items():
        for cut in range(1, len(token)):
            left, right = place_of.get(token[:cut]), place_of.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-score, place_of[token], left, right, cut))
    ranked.sort()
    tokens = list(score_of)
    return [(tokens[place][:cut], tokens[place][cut:]) for _, place, _, _, cut in ranked]


def _scores(gguf: GgufFile, num_tokens: int) -> list[float]:
    scores = gguf.get("tokenizer.ggml.scores", list)
    if len(scores) != num_tokens or not all(isinstance(score, float) for score in scores):
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.scores has {len(scores)} entries for {num_tokens} tokens, "
            "expected as many numbers"
        )
    return scores
