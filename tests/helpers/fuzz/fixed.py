"""Ten programs that every run of the fuzzer trains. Together they use nearly all features."""

from __future__ import annotations

from tests.helpers.fuzz.programs import Again, Block, Leaf, Placing, Precision, Program, ShardCall, Step

__all__ = ["FIXED"]

FIXED = (
    Program(
        tree=Block(
            kind="dead",
            children=(
                Leaf(kind="thin", size=5, dtype="bfloat16"),
                Leaf(
                    kind="norm",
                    size=2,
                    returns="with input",
                    state=ShardCall(
                        reshard=1, dim=-1, precision=Precision(param="float32", reduce="float32", cast_inputs=False)
                    ),
                ),
                Leaf(),
            ),
            uses_all=True,
            state=ShardCall(),
        ),
        width=3,
        by_seed=True,
    ),
    Program(
        tree=Block(
            kind="repeat",
            children=(
                Leaf(
                    kind="table",
                    size=5,
                    bias=True,
                    frozen=(0, 2),
                    returns="dict",
                    state=ShardCall(reshard=False, forward_prefetch=(2, 2), backward_prefetch=()),
                ),
                Leaf(kind="idle", frozen=(0, 1, 2)),
                Leaf(kind="empty"),
            ),
            times=3,
            returns="view",
            uses_all=True,
            state=ShardCall(reshard=True),
        ),
        width=2,
        mesh=(2, 1),
        placing=Placing(),
        inside="dispatch mode",
        steps=(
            Step(
                backwards=("first, then second",),
                hold="no_sync, sharded",
                keep="always",
                input_grad=True,
                fails_at=1,
                generate=True,
            ),
            Step(backwards=("all", "second"), finish="synchronize", fails_at=4),
            Step(
                backwards=("first, then second",),
                hold="no_sync, sharded",
                keep="always",
                input_grad=True,
                fails_at=1,
                generate=True,
            ),
        ),
    ),
    Program(
        tree=Block(
            kind="fork",
            children=(Leaf(), Leaf(kind="thin", dtype="bfloat16", returns="tuple", uses_all=True)),
            times=3,
            uses_all=True,
            together=ShardCall(reshard=False),
        ),
        mesh=(2, 1),
        by_seed=True,
        feedback=True,
        hidden="list",
        inside="function mode",
        steps=(
            Step(
                backwards=("all", "all", "all"),
                order="joined",
                by_hand="unshard before, async",
                reshard=False,
                fails="backward",
                fails_at=1,
            ),
            Step(
                backwards=("twice", "first"),
                order="late, reversed",
                in_flight=2,
                evaluate=(("before", "no_grad"), ("before", "inference_mode")),
            ),
            Step(
                backwards=("all", "all", "all"),
                order="joined",
                by_hand="unshard before, async",
                reshard=False,
                fails="backward",
                fails_at=1,
            ),
        ),
    ),
    Program(
        tree=Block(
            kind="residual",
            children=(
                Leaf(
                    kind="thin",
                    size=3,
                    dtype="float32",
                    absent=(0, 2),
                    uses_all=True,
                    state=ShardCall(reshard=1, tied=True, method=True),
                ),
                Again(which=3),
            ),
            times=3,
            uses_all=True,
            state=ShardCall(reshard=1, precision=Precision(param="float32", reduce="float64", cast_inputs=False)),
        ),
        width=3,
        mesh=(2, 1),
        optimizer="adamw",
        steps=(
            Step(
                backwards=("first, then second",),
                in_flight=2,
                keep="until last",
                input_grad=True,
                by_hand="reshard between",
            ),
            Step(
                backwards=("first, then second", "second", "all"),
                order="late",
                hold="roots",
                in_flight=100,
                input_grad=True,
                by_hand="unshard before",
                fails_at=2,
                tangents=True,
            ),
            Step(hold="all-reduce", in_flight=100, is_last=True, by_hand="reshard between", fails_at=2),
        ),
    ),
    Program(
        tree=Block(
            kind="recursive",
            children=(
                Leaf(kind="scale", dtype="float32"),
                Again(which=6),
                Block(
                    kind="recursive",
                    children=(
                        Leaf(kind="scale", dtype="float32"),
                        Block(kind="checkpoint", children=(Leaf(kind="thin", dtype="bfloat16"),)),
                        Leaf(kind="norm", frozen=(0, 1), part="first"),
                    ),
                    state=ShardCall(
                        reshard=False,
                        precision=Precision(param="float64", reduce="bfloat16", output="float32", cast_inputs=False),
                    ),
                ),
            ),
            together=ShardCall(reshard=False, dim=1, precision=Precision(param="float64", cast_inputs=False)),
            state=ShardCall(),
        ),
        width=2,
        mesh=(1, 1),
        placing=Placing(tensor_ranks=2, arrival="either"),
        by_seed=True,
        steps=(
            Step(abandoned=True, by_hand="unshard before", fails_at=3),
            Step(abandoned=True, by_hand="unshard before", fails_at=3),
            Step(abandoned=True, by_hand="unshard before", fails_at=3),
        ),
    ),
    Program(
        tree=Block(
            kind="dead",
            children=(
                Leaf(
                    kind="idle",
                    size=2,
                    frozen=(0, 1, 2),
                    ignored=True,
                    uses_all=True,
                    state=ShardCall(reshard=2, dim=-1),
                ),
                Leaf(kind="conv", size=5, frozen=(0, 1, 2), ignored=True, uses_all=True),
                Leaf(kind="conv", size=5),
            ),
            times=3,
            together=ShardCall(
                precision=Precision(param="float32", reduce="float32", cast_inputs=False), forward_prefetch=()
            ),
        ),
        width=7,
        feedback=True,
        hidden="list",
        inside="autocast",
        steps=(
            Step(
                backwards=("first, then second", "twice", "first"),
                order="late, reversed",
                keep="until last",
                evaluate=(("between", "no_grad"), ("after", "no_grad")),
                abandoned=True,
                fails_at=2,
            ),
            Step(backwards=("all", "first, then second"), fails="forward"),
            Step(finish="finalize", keep="until last", fails="backward", fails_at=2),
        ),
    ),
    Program(
        tree=Block(
            kind="checkpoint",
            children=(
                Block(
                    children=(
                        Block(
                            kind="repeat",
                            children=(
                                Leaf(),
                                Leaf(borrows=True, uses_all=True, state=ShardCall(reshard=True, forward_prefetch=())),
                            ),
                            uses_all=True,
                            state=ShardCall(reshard=1, tied=True),
                        ),
                        Leaf(kind="thin", size=2, bias=True, uses_all=True, state=ShardCall(reshard=True, tied=True)),
                    ),
                    returns="dataclass",
                    together=ShardCall(reshard=True),
                ),
                Leaf(kind="thin", size=2, returns="nested", uses_all=True, state=ShardCall()),
                Block(
                    kind="reentrant checkpoint",
                    children=(Again(which=5), Leaf(kind="idle", size=5, dtype="float32"), Again(which=1)),
                    returns="nested",
                    together=ShardCall(reshard=False, precision=Precision(reduce="bfloat16")),
                ),
            ),
            times=3,
            together=ShardCall(reshard=True, forward_prefetch=()),
            state=ShardCall(),
        ),
        width=7,
        optimizer="adamw",
        hidden="dict",
        inside="selective checkpoints",
        steps=(
            Step(hold="no_sync of a part", in_flight=100, abandoned=True, fails_at=1),
            Step(hold="no_sync of a part", in_flight=100, abandoned=True, fails_at=1),
            Step(hold="no_sync of a part", in_flight=100, abandoned=True, fails_at=1),
        ),
    ),
    Program(
        tree=Block(
            kind="recursive",
            children=(Leaf(),),
            uses_all=True,
            together=ShardCall(),
            state=ShardCall(reshard=1, backward_prefetch=(0,)),
        ),
        width=7,
        mesh=(2, 1),
        optimizer="adamw-fused",
        feedback=True,
        steps=(
            Step(
                backwards=("first, then second",),
                hold="all",
                keep="until last",
                evaluate=(("before", "inference_mode"), ("before", "no_grad")),
                by_hand="unshard before",
                fails_at=1,
            ),
            Step(
                backwards=("second", "all", "second"),
                order="late",
                evaluate=(("after", "inference_mode"),),
                by_hand="unshard before, async",
                fails="forward",
                fails_at=4,
            ),
            Step(backwards=("all", "all"), order="late", by_hand="unshard after"),
        ),
    ),
    Program(
        tree=Block(kind="residual", children=(Leaf(),), times=3, state=ShardCall()),
        width=4,
        mesh=(1,),
        placing=Placing(tensor_ranks=2, arrival="partial"),
        steps=(Step(backwards=("second",)), Step(backwards=("second",)), Step(backwards=("second",))),
    ),
    Program(
        tree=Block(
            kind="checkpoint",
            children=(
                Leaf(kind="empty", size=2, dtype="bfloat16", returns="tuple"),
                Leaf(borrows=True, uses_all=True),
                Leaf(kind="table", size=2),
            ),
            uses_all=True,
            together=ShardCall(reshard=False),
            state=ShardCall(reshard=False, forward_prefetch=(5, 3, 5)),
        ),
        width=2,
        mesh=(1,),
        placing=Placing(tensor_ranks=2, full=False),
        optimizer="adamw",
        steps=(
            Step(backwards=("second",), hold="no_sync of a part", by_hand="unshard after", fails_at=4),
            Step(
                backwards=("second", "all"),
                order="late",
                hold="no_sync",
                evaluate=(("after", "no_grad"),),
                input_grad=True,
                fails_at=3,
            ),
            Step(
                is_last=True,
                evaluate=(("between", "inference_mode"),),
                by_hand="unshard before, async",
                reshard=False,
                fails_at=2,
            ),
        ),
    ),
)
