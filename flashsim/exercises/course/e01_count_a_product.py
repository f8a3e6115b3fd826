"""Count one matrix product by hand.

The product is S = Q Kᵀ in float32. Q has 40 rows of 16 elements; K has 48 rows of 16 elements.
A thread block (a *step*) owns a tile of 8 rows of Q, and loads it once. Then the step loops
over K in tiles of 16 rows: it loads a tile of K, multiplies, and stores the 8 × 16 tile of S. A
step keeps nothing else on chip, and no step can use what another step loaded.

Fill in ANSWERS. All answers are integers: numbers of bytes or FLOPs. One multiply-add counts as
two FLOPs.
"""

from flashsim.exercises.exercise import Exercise, Problem, Question, Task, Tiling
from flashsim.exercises.references import scores


def reference(machine):
    """Compute S = Q K^T with the loop that the questions describe."""
    hbm, p = machine.hbm, machine.problem
    with machine.stage("scores") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                Q = sram.load(hbm.Q, rows)
                for cols in machine.key_tiles():
                    with sram.visit(rows, cols):
                        S = Q @ sram.load(hbm.K, cols).T
                        S *= p.scale
                        sram.store(hbm.S, rows, S, cols)


def _slips(tensor, op="load"):
    def slips(trace):
        right, rows, cols = trace.bytes(op, tensor), trace.schedule.t_r, trace.schedule.t_c
        found = {right // 4: "you counted elements; a float32 has 4 bytes"}
        if tensor == "K":
            found[right // rows] = f"this is K once; there are {rows} steps, which share nothing"
        else:
            found[right * rows] = "each step moves only its own rows"
            found[right * cols] = "a step keeps its tile of Q while it loops over the keys"
        return found

    return slips


EXERCISE = Exercise(
    name="count-a-product",
    statement=__doc__,
    task=Task(Problem(40, n_kv=48, head_dim=16), Tiling(8, 16), 4096, outputs=("S",)),
    reference=reference,
    truth=scores,
    hints=(
        "How many steps are there? What does each of them load, and how often?",
        "There are 40 / 8 = 5 steps. Each loads 8 rows of Q and, tile by tile, all of K.",
        "K: 5 steps × 48 rows × 16 elements × 4 bytes. FLOPs: 2 for each of 40 × 48 × 16.",
    ),
    questions=(
        Question("bytes of Q loaded", lambda trace: trace.bytes("load", "Q"), _slips("Q")),
        Question("bytes of K loaded", lambda trace: trace.bytes("load", "K"), _slips("K")),
        Question("bytes of S stored", lambda trace: trace.bytes("store"), _slips("S", "store")),
        Question(
            "FLOPs of the product",
            lambda trace: trace.flops("matmul"),
            lambda trace: {trace.flops("matmul") // 2: "a multiply-add is two FLOPs"},
        ),
    ),
)
