"""What fairseq's layers do with their weights."""

from fairseq.modules import MultiheadAttention

from paramshare import register_kind

# Outside of step-by-step decoding it hands its children's weights to torch's attention function
# (F.multi_head_attention_forward in its forward) and never calls them.
register_kind(
    MultiheadAttention,
    reads=tuple(f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
)
