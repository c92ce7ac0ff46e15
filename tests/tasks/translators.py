"""fairseq's options for small translators of each architecture, and for their task."""

SIDES = ("encoder", "decoder")
SIZES = [
    f"--{side}-{what}={value}"
    for side in SIDES
    for what, value in (
        ("layers", 2),
        ("embed-dim", 32),
        ("ffn-embed-dim", 48),
        ("attention-heads", 2),
    )
]
MODEL = ["--arch", "transformer_iwslt_de_en", *SIZES, "--dropout", "0"]
# Both have four layers on each side.
LSTM = ["--arch", "lstm", "--dropout", "0", "--decoder-out-embed-dim=16"]
LSTM += [f"--{side}-{what}" for side in SIDES for what in ("embed-dim=16", "layers=4")]
FCONV = ["--arch", "fconv", "--dropout", "0", "--decoder-out-embed-dim=16"]
FCONV += [f"--{side}-embed-dim=16" for side in SIDES]
FCONV += [f"--{side}-layers=[(16, 3)] * 4" for side in SIDES]

TASK = ["--task", "shared_translation", "--source-lang", "en", "--target-lang", "vi"]
