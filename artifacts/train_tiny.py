"""Train the bundled checkpoint ``tiny-qwen3_5``: a small Qwen3.5 with its MTP head.

The JSON files in that folder say what to train and are kept by hand; this script makes
``tokenizer.json``, ``model.safetensors`` and ``training.json`` beside them, from the sources of
the running Python's standard library, in well under an hour on two CPU cores. The layout is that
of the published checkpoints, except that no vision tensors are written: ``vision_config`` is
there only because the layout has one. Needs torch, transformers >= 5.24 and safetensors.

    python artifacts/train_tiny.py
"""

import argparse
import json
import math
import platform
import re
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, Qwen3_5Config, Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

FOLDER = Path(__file__).with_name("tiny-qwen3_5")
DEPTHS, BATCH, WIDTH, LONG_WIDTH = 3, 16, 192, 768
WEIGHTS = torch.tensor([1.0, 0.3, 0.2, 0.1])  # of the losses: target, then MTP depth 1, 2, 3
# The pre-tokenizer of the published Qwen3.5 tokenizers.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = "<|im_start|>user\nwrite {}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
# Tests, tables and vendored or generated files: little of them reads like ordinary code.
SKIPPED = re.compile(
    r"(^|/)(tests?|idlelib|encodings|pydoc_data|lib2to3|turtledemo|ensurepip"
    r"|(site|dist)-packages|_?sysconfig[^/]*|config-[^/]*|this\.py)(/|$)|/test_"
)


def documents() -> tuple[list[str], list[str]]:
    """Return the training and the held-out documents, each ended by its eos token."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    split: tuple[list[str], list[str]] = ([], [])
    for i, name in enumerate(n for n in names if not SKIPPED.search("/" + n)):
        text = (root / name).read_text(encoding="utf-8", errors="ignore")
        module = name.removesuffix(".py").replace("/", ".")
        split[i % 25 == 24].extend(framed(p, module, k) for k, p in enumerate(pieces(text)))
    return split


def pieces(text: str, limit: int = 1500) -> Iterator[str]:
    """Cut a source file before top-level statements and methods, so that documents end often."""
    piece = ""
    for block in re.split(r"(?=\n\n+(?:\S|    def |    @))", text):
        if piece.strip() and len(piece) + len(block) > limit:
            yield piece.strip("\n")
            piece = ""
        piece += block
    if piece.strip():
        yield piece.strip("\n")


def framed(piece: str, module: str, index: int) -> str:
    """End a piece; every fourth becomes a chat turn, so that both eos ids are learnt."""
    if index % 4 == 3:
        name = re.search(r"^ *(?:def|class) (\w+)", piece, re.MULTILINE)
        piece = CHAT.format(f"{module}.{name[1]}" if name else module, piece)
    return f"{piece}\n<|endoftext|>"


def make_tokenizer(texts: list[str], special: list[str], size: int) -> Tokenizer:
    """Train a byte-level BPE with the special tokens at the end of the vocabulary."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tok.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"initial_alphabet": as_bytes.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size - len(special), **options)
    tok.train_from_iterator((re.sub(r"<\|\w+\|>", "", text) for text in texts), trainer)
    tok.add_special_tokens(special)
    return tok


class Head(nn.Module):
    """The MTP head; parameter names are those of the checkpoint after ``mtp.``."""

    def __init__(self, config: Any) -> None:
        """Build one full-attention layer of the target's kind."""
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = hf.Qwen3_5RMSNorm(size, eps)
        self.pre_fc_norm_hidden = hf.Qwen3_5RMSNorm(size, eps)
        layer = hf.Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))
        layer.self_attn.layer_idx = 0  # it has a cache of its own
        self.layers = nn.ModuleList([layer])
        self.norm = hf.Qwen3_5RMSNorm(size, eps)

    def forward(self, emb: Tensor, hidden: Tensor, rope: Any, mask: Tensor, cache: Any) -> Tensor:
        """Run one draft depth over all rows; the result feeds lm_head and the next depth."""
        x = torch.cat([self.pre_fc_norm_embedding(emb), self.pre_fc_norm_hidden(hidden)], -1)
        x = self.layers[0](self.fc(x), position_embeddings=rope, attention_mask=mask, cache=cache)
        return self.norm(x)


def run(model: Any, head: Head, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the target's logits, and each depth's logits for all rows it can be scored on.

    Row p of depth j takes token p+j at position p+j-1 and predicts token p+j+1. As when serving,
    it sees depth 1 of rows 0..p (rows of true tokens) and only its own row of later depths.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    rows = ids.shape[1] - DEPTHS - 1
    draft, cache, emb = hidden[:, :rows], DynamicCache(), model.model.embed_tokens(ids)
    eye = torch.eye(rows, dtype=torch.bool)
    mask, drafts = torch.ones_like(eye).tril(), []
    for depth in range(1, DEPTHS + 1):
        rope = model.model.rotary_emb(emb, torch.arange(rows)[None] + depth - 1)
        draft = head(emb[:, depth : depth + rows], draft, rope, mask[None, None], cache)
        mask = torch.cat([mask, eye], 1)
        drafts.append(model.lm_head(draft))
    return model.lm_head(hidden), drafts


def losses(model: Any, head: Head, ids: Tensor) -> Tensor:
    """Return the cross entropy of the target and of each depth."""
    main, drafts = run(model, head, ids)
    each = enumerate([main[:, :-1], *drafts], 1)
    pairs = [(x.flatten(0, 1), ids[:, j : j + x.shape[1]].flatten()) for j, x in each]
    return torch.stack([cross_entropy(x, y) for x, y in pairs])


def initialise(model: Any, head: Head) -> None:
    """Keep transformers' start, but for heads that remember from the first step on."""
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.02)
    for name, param in model.named_parameters():
        if name.endswith("dt_bias"):  # softplus(dt_bias) between 0.001 and 0.1, as in Mamba
            step = torch.exp(torch.empty_like(param).uniform_(math.log(1e-3), math.log(0.1)))
            param.data.copy_(step + torch.log(-torch.expm1(-step)))


def train(model: Any, head: Head, stream: Tensor, steps: int) -> list[float]:
    """Train target and head together; return the mean losses of the last 50 steps."""
    params = [*model.parameters(), *head.parameters()]
    vectors: dict[str, Any] = {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}
    groups = [{"params": [p for p in params if p.ndim > 1]}, vectors]
    opt = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    # Warm up, follow a cosine of at least 1,000 steps, and end at zero however few they are.
    turn = math.pi / max(steps, 1000)
    cosine = [0.02 + 0.49 * (1 + math.cos(turn * s)) for s in range(steps + 1)]
    factors = [min((s + 1) / 50, c, (steps - s) / 100) for s, c in enumerate(cosine)]
    rate = torch.optim.lr_scheduler.LambdaLR(opt, factors.__getitem__)
    start, recent = time.perf_counter(), torch.empty(0, DEPTHS + 1)
    for step in range(steps):
        # Longer rows at the end: the model then stays sane beyond a few hundred tokens.
        width = WIDTH if step < 0.85 * steps else LONG_WIDTH
        at = torch.randint(len(stream) - width, (BATCH * WIDTH // width,)).tolist()
        each = losses(model, head, torch.stack([stream[i : i + width] for i in at]))
        opt.zero_grad()
        (each * WEIGHTS).sum().backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        rate.step()
        recent = torch.cat([recent[-49:], each.detach()[None]])
        if step % 25 == 0 or step == steps - 1:
            mean = " ".join(f"{x:.3f}" for x in recent.mean(0))
            print(f"step {step} losses {mean} {time.perf_counter() - start:.0f}s", flush=True)
    return recent.mean(0).tolist()


def save(model: Any, head: Head) -> None:
    """Write the weights under the published names: bf16, but for two kinds kept in float32."""
    target = model.model.state_dict()  # without lm_head, which is tied
    tensors = {f"model.language_model.{name}": t for name, t in target.items()}
    tensors |= {f"mtp.{name}": t for name, t in head.state_dict().items()}
    exact = ("A_log", "linear_attn.norm.weight")
    stored = {k: t if k.endswith(exact) else t.bfloat16() for k, t in tensors.items()}
    save_file(stored, FOLDER / "model.safetensors", metadata={"format": "pt"})


def load() -> tuple[Any, Head]:
    """Load what was saved, to measure exactly that, for computing in float32."""
    model = Qwen3_5ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    head = Head(model.config).eval()
    tensors = load_file(FOLDER / "model.safetensors").items()
    head.load_state_dict({k[4:]: t.float() for k, t in tensors if k.startswith("mtp.")})
    return model, head


@torch.no_grad()
def acceptance(model: Any, head: Head, ids: Tensor, skip: int) -> list[float]:
    """Return how often drafts 1..j all equal the target's own argmax, from row ``skip`` on."""
    main, drafts = run(model, head, ids)
    target, good, rates = main.argmax(-1), torch.tensor(True), []
    for depth, logits in enumerate(drafts, 1):
        good = good & (logits.argmax(-1) == target[:, depth : depth + logits.shape[1]])
        rates.append(round(good[:, skip:].float().mean().item(), 4))
    return rates


def measure(stream: Tensor) -> dict[str, list[float]]:
    """Measure acceptance on held-out text and on what the model writes greedily after it."""
    model, head = load()
    rows = stream[: len(stream) // 256 * 256].view(-1, 256)[::2][:64]
    model.generation_config.eos_token_id = None  # all rows stay equally long
    own = model.generate(rows[:32, :32], max_new_tokens=224, do_sample=False)
    texts = {"held_out_text": rows, "own_greedy_text": own}
    return {name: acceptance(model, head, ids, 32) for name, ids in texts.items()}


def main() -> None:
    """Train, save and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    steps, start = parser.parse_args().steps, time.perf_counter()
    torch.manual_seed(0)
    # Half the default chunk is nearly twice as fast for short rows of small heads.
    hf.torch_chunk_gated_delta_rule = partial(hf.torch_chunk_gated_delta_rule, chunk_size=32)
    config: Any = Qwen3_5Config.from_pretrained(FOLDER).text_config
    names = json.loads((FOLDER / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    special, texts = [t["content"] for t in names.values()], documents()
    tok = make_tokenizer(texts[0], special, config.vocab_size)
    assert [str(tok.token_to_id(t)) for t in special] == list(names)
    tok.save(str(FOLDER / "tokenizer.json"))
    lists = ([i for e in tok.encode_batch(part) for i in e.ids] for part in texts)
    seen, unseen = map(torch.tensor, lists)
    model, head = Qwen3_5ForCausalLM(config), Head(config)
    initialise(model, head)
    final = train(model, head, seen, steps)
    save(model, head)
    report = {"python": platform.python_version(), "steps": steps, "tokens": len(seen)}
    report |= {"seconds": round(time.perf_counter() - start), "losses": final, **measure(unseen)}
    (FOLDER / "training.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
