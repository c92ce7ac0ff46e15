"""The `--share-*` options of the plugins, and what they do to a fairseq model."""

import logging
import re
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from torch import nn

from paramshare import ShareError, share_from_embedding
from paramshare.depth import MAPS, check_depth
from paramshare.layout import LAYOUTS
from paramshare.plan import EXECUTIONS, INITS
from paramshare.report import count_parameters
from paramshare.rewrite import prepare_all
from paramshare.sharing import read_plans
from paramshare.tasks.recomputation import recompute_in_one_pass

logger = logging.getLogger(__name__)

Shares, Layouts = ChoiceEnum(["veps", "eps", "none"]), ChoiceEnum(list(LAYOUTS))


# fairseq makes its parser from the types themselves: no postponed annotations here, and Optional.
@dataclass
class ShareConfig(FairseqDataclass):
    """The options of `paramshare.share_from_embedding`."""

    share: Shares = field(  # type: ignore[valid-type]
        default="veps",
        metadata={
            "help": "where the dense weights are read from: a learned projection of the token "
            "table (veps), the table itself (eps), or nowhere: the plain model (none)"
        },
    )
    share_depth: str = field(
        default="all",
        metadata={
            "help": f"which layers of a stack read the same columns: {MAPS}; M distinct layers"
        },
    )
    share_layout: Layouts = field(  # type: ignore[valid-type]
        default="aligned", metadata={"help": "how columns are read as a matrix"}
    )
    share_blocks: Optional[int] = field(
        default=None,
        metadata={"help": "aligned layout: at most this many rows of a weight in a column"},
    )
    share_virtual_dim: Optional[int] = field(
        default=None, metadata={"help": "columns of the virtual table; default: those needed"}
    )
    share_embedding_dim: Optional[int] = field(
        default=None,
        metadata={"help": "narrow the token table to this many features first, with a lift"},
    )
    share_init: ChoiceEnum(list(INITS)) = field(  # type: ignore[valid-type]
        default="match",
        metadata={"help": "match: weights start with the spread of their layers' own init"},
    )
    share_whiten: bool = field(
        default=False,
        metadata={"help": "veps: read the table's rows as if they were an orthonormal basis"},
    )
    share_table_gradient: float = field(
        default=0.1,
        metadata={"help": "share of the weights' gradient that reaches the table"},
    )
    share_execution: ChoiceEnum(list(EXECUTIONS)) = field(  # type: ignore[valid-type]
        default="auto",
        metadata={"help": "build the weights, a tile of them at a time, or apply them factored"},
    )


Plans = dict[str, dict[str, Any]]  # path of what was shared -> its plan, as plain data


def share_model(model: nn.Module, cfg: ShareConfig) -> Plans:
    """Shares a model with an encoder, or with that and a decoder, as the options say, and logs what
    that did.

    The encoder reads the encoder's table and the decoder the decoder's; where there is one, one
    call allocates for all: it is one for both, or the encoder reads no tokens. Raises ShareError
    with fairseq's names of the options.
    """
    depth = str(cfg.share_depth)
    try:
        check_depth(depth)
    except ShareError:
        raise ShareError(
            f"--share-depth {depth} is unknown: use one of {MAPS} (M distinct layers)"
        ) from None
    if cfg.share == "none":
        refuse_shared_states(model)
        return {}
    sides = ["encoder"]
    if hasattr(model, "decoder"):
        reads_tokens = getattr(model.encoder, "dictionary", None) is not None  # not pictures
        sides = ["encoder", "decoder"] if reads_tokens else ["decoder"]
    tables = {name: _table(model, name) for name in sides}
    if len(set(tables.values())) == 1:
        tables = {"": tables[sides[0]]}
    dense = count_parameters(model)
    plans = {}
    for path, table in tables.items():
        root = model.get_submodule(path)
        try:
            sharing = share_from_embedding(
                root,
                table,
                virtual=cfg.share == "veps",
                depth=depth,
                layout=str(cfg.share_layout),
                blocks=cfg.share_blocks,
                virtual_dim=cfg.share_virtual_dim,
                embedding_dim=cfg.share_embedding_dim,
                table_gradient=cfg.share_table_gradient,
                init=str(cfg.share_init),
                whiten=cfg.share_whiten,
                execution=str(cfg.share_execution),
            )
        except ShareError as error:
            raise ShareError(
                f"--share {cfg.share} of {path or 'the model'} ({type(root).__name__}): "
                f"{in_options(error)} (--share none trains the plain model)"
            ) from None
        plans[path] = sharing.plan.to_dict()
        logger.info(f"shared weights of {path or 'the model'}:\n{sharing}")
    recompute_in_one_pass(model)
    stored = count_parameters(model)
    logger.info(f"parameters: stored {stored:,} | dense {dense:,} | ratio {dense / stored:.2f}")
    return plans


def share_again(model: nn.Module, plans: Plans) -> None:
    """Shares a model as it was when `share_model` returned these plans, for values that come from
    the checkpoint. Raises ShareError, the model being what it was."""
    try:
        if not isinstance(plans, dict):
            raise ShareError(f"a {type(plans).__name__} instead of plans by their paths")
        stored = [{"root": path, "plan": plan} for path, plan in plans.items()]
        rewrites = prepare_all(model, read_plans(stored)) if stored else []
    except ShareError as error:
        raise ShareError(
            f"the checkpoint's sharing plan does not fit the model that is built: {error}; "
            "a shared model cannot be loaded with other layers or sizes "
            "(--encoder-layers-to-keep, --decoder-layers-to-keep, --model-overrides)"
        ) from None
    for rewrite in rewrites:
        rewrite.commit()


class SharingTask:
    """Before a task of fairseq among the bases: its checkpoints know how weights were shared."""

    cfg: ShareConfig
    plans: Plans = {}  # of the model built last

    def share(self, model: nn.Module, from_checkpoint: bool) -> None:
        """Shares a model as the options say; one that is loaded to be used as it was trained,
        whatever the options of the command that loads it."""
        if from_checkpoint:
            share_again(model, self.plans)
        else:
            self.plans = share_model(model, self.cfg)

    def state_dict(self) -> dict[str, Any]:
        """Goes into the checkpoint; fairseq gives it back before it builds a model to load."""
        return {**super().state_dict(), "sharing_plans": self.plans}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.plans = state.pop("sharing_plans", {})
        super().load_state_dict(state)  # type: ignore[misc]


def in_options(error: ShareError) -> str:
    """The error of the call, with fairseq's names of the options."""
    text = str(error).replace("select=, ", "").replace("virtual=True", "--share veps")
    names = "depth|layout|blocks|virtual_dim|embedding_dim|table_gradient|init|whiten|execution"
    return re.sub(rf"\b({names})=", lambda found: f"--share-{found[1].replace('_', '-')} ", text)


def _table(model: nn.Module, name: str) -> nn.Module:
    part = getattr(model, name, None)
    table = getattr(getattr(part, "sentence_encoder", part), "embed_tokens", None)
    if table is None:
        raise ShareError(
            f"{type(model).__name__} has no {name} with a token table (embed_tokens) to read "
            "from; use another --arch, or --share none"
        )
    return table


def refuse_shared_states(model: nn.Module) -> None:
    """From now on the plain model says what is wrong with the state of a shared one."""
    model.register_load_state_dict_pre_hook(_check_no_plan)


def _check_no_plan(
    model: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    pools = ("paramshare._extra_state", "paramshare.plan_version_1")
    if any(name.endswith(pools) for name in state):
        errors.append("the checkpoint was made with other --share options: its model is shared")
