"""Configuration of a decoder-only transformer with memory layers or a mixture of experts."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


class MegamemConfig(PreTrainedConfig):
    """RMSNorm, SwiGLU or experts, RoPE, grouped queries; and memories beside or instead of feed-forwards.

    Attributes:
        rope_parameters: `rope_theta`, and `rope_type` with its keys: "default", "linear", "yarn" or "llama3".
        qk_norm: RMS-normalise queries and keys per head before RoPE.
        qkv_bias: Add biases to queries, keys and values.
        latent_attention: None, or keys and values of all heads are made of one latent per token: `latent_dim`, its width;
            `rotary_dim`, columns of a head that RoPE turns, whose keys all heads share; `query_latent_dim`, the width of
            a latent that queries are made of, or None. `qk_norm` then normalises the latents.
        residual_streams: None, or several residual streams, which attention and feed-forwards read and write: `count` of
            them; `kind`: "mhc", "single_pass", "gated" or "plain"; of the first two `iterations` of Sinkhorn's steps and
            `epsilon`, added in them and to weights of reads; `norm_epsilon`, added in the norms before the maps;
            `site_weights` and `end_weights`, shapes of the weights of a site, and of the end.
        moe: None, or a mixture of experts instead of every feed-forward: `num_experts`; `top_k` of them per token;
            `intermediate_size` of one; `renormalise`: whether the weights of a token's experts are divided by their
            sum.
        memory: None, or the memories:
            `scoring`: how keys are scored and combined: "tucker"; "product"; "heads", product keys whose queries are
            what the memory is given, cut into heads, each of which has a sum of its own; or "rows", a key for every row.
            `queries`: of Tucker scores, whether a side has one in all ("single"), one per head ("per_head") or one per
            rank of the core ("per_rank").
            `num_heads`, `row_top_k` (rows and columns kept by the first stage), `top_k` (entries kept by the second),
            `num_scores` (per entry), `num_sums` (values are added up in), `activation` (of the pre-values' products:
            "none" or "gelu").
            `tables`: columns of each table of a bank, by name. `table_bits`: None, or 8 or 4, codes of a row's elements.
            `bank_rows`: rows of each bank; `first_bank`: the first one's number.
            `layers`: one mapping for each memory. It reads in `block`, with the normalised stream of block `queried`, and
            its output is added after block `added_after`. `slot`: "beside" the feed-forward, "instead" of it, "skip"
            (beside it, added later), or all that the block adds, given the residual stream and attention ("inserted"),
            the stream and the heads of attention without an output projection ("stream_and_heads"), attention
            ("projected") or its heads ("block"). `layer_norm`: LayerNorm stands before that attention. It sees `num_rows` rows of bank `bank`
            from `first_row` on. `round_keys`: of the shuffle, or None. `weights`: the shapes of its own weights.
            Where `scoring` is "ngrams", hashes of a token's n-grams say what is read, `slot` is "entry" (before
            attention), and there are instead: `max_order`, tokens of the longest n-gram; `boundary_id`, which stands
            before a text, and with `cut_at_boundary` hides what is before it in one; in `layers`, `head_rows`, the rows
            of each head.
            Where `scoring` is "tokens", a token reads `rows_per_token` rows, `slots_per_address` of its id or, with an
            `address`, of each hash of its n-grams (`operation`; `orders`, `multipliers`, `moduli` and `offsets` by hash;
            `missing`, what a text's start cuts is in place of a hash, or None; `signs`, None or hashes of the same form, which
            choose patterns of signs that rows are multiplied by): `slot` is "values" or "latents" (joining those of attention:
            mixed by gates for `num_gate_heads` equal parts, or side by side, through `gate` and `up_proj`, or as `router` and
            `gate` of each head choose), "instead" (the row stands for the feed-forward's up-projection), "embedding"
            (projected rows are averaged with the input embedding and multiplied by `amplification`: "none", "sqrt_width" or
            "layer_norm"), "entry" (the sum of rows, times a gain, is added before attention), or, where blocks weigh the same
            normalised rows (`reads_once`), whose weights have `shared_weights` as shapes, as above.
        second_memory: None, or the same of memories of another kind. A block may have one of each, if one acts in
            attention.
        backbone: class of transformers that a model that was grown is without the inserted blocks; None of others.
        memory_device: None: tables are parameters of the model. "cpu": they stay in the weights' files, which are
            mapped into host memory, and what is read of them is moved to where the model is.
        hot_rows: rows of every table that stay where the model is, of those that are read most; with `memory_device`.
    """

    model_type = "megamem"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    # Memories, routers and sites of residual streams stay whole on every rank.
    base_model_tp_plan = {  # noqa: RUF012
        **{f"layers.*.self_attn.{side}_proj": "colwise" for side in ("q", "k", "v", "kv_up")},
        "layers.*.self_attn.o_proj": "rowwise",
        **{f"layers.*.mlp.{part}_proj": "colwise" for part in ("gate", "up")},
        "layers.*.mlp.down_proj": "rowwise",
        **{f"layers.*.mlp.experts.*.{part}_proj": "colwise" for part in ("gate", "up")},
        "layers.*.mlp.experts.*.down_proj": "rowwise",
    }

    vocab_size: int = 257
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 32
    rms_norm_eps: float = 1e-5
    rope_parameters: Any = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    qk_norm: bool = True
    qkv_bias: bool = False
    latent_attention: Any = None
    residual_streams: Any = None
    tie_word_embeddings: bool = True
    use_cache: bool = True
    moe: Any = None
    memory: Any = None
    second_memory: Any = None
    backbone: str | None = None
    memory_device: str | None = None
    hot_rows: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **others: Any) -> None:
        if self.memory_device not in (None, "cpu"):
            raise ValueError(f"memory_device is {self.memory_device!r}: it may be null or 'cpu'")
        super().__post_init__(**others)

    @property
    def reads_normalised(self) -> bool:
        """True if sites normalise what they read: blocks then have no norms, and the model no last one."""
        return self.residual_streams is not None and self.residual_streams["kind"] == "gated"

    @property
    def memories(self) -> list[dict[str, Any]]:
        """The kinds of memories that there are."""
        return [memory for memory in (self.memory, self.second_memory) if memory is not None]
