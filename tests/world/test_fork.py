"""A forked child does not disturb the ranks."""

from tests.world.jobs import run_job

# Rank 0 forks while the others are in a call; then all make calls.
FORKS = """
import atexit

world = start(Settings(backend="cpu", world_limit=10.0))
for number, act in enumerate(CHILDREN):
    world.barrier()
    child = os.fork() if world.rank == 0 else None
    if child == 0:
        atexit.register(lambda: show(f"handler of child {number}"))
        print(f"child {number}", file=sys.stderr, flush=True)
        exec(act)
        sys.exit(9)
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        show(f"child {number} ended with {code}")
    for _ in range(30):
        assert world.gather(world.rank) == [0, 1]
        world.allocate(64).free()
if world.rank == 0:
    show("parents continue")
"""


def run_children(children: dict[str, int]) -> str:
    """The output of a job whose rank 0 forks each child, which end as wanted."""
    status, output = run_job(FORKS.replace("CHILDREN", repr([*children])))
    assert status == 0, output
    assert "parents continue" in output
    for child_idx, (child, code) in enumerate(children.items()):
        assert f"child {child_idx} ended with {code}\n" in output, child
        assert f"handler of child {child_idx}\n" in output, child
    return output


def test_child_that_ends_leaves_the_ranks_alone():
    run_children(
        {
            "sys.exit(7)": 7,
            "sys.exit()": 0,
            "raise ValueError('of the child')": 1,
            "with world: sys.exit(3)": 3,
        }
    )


def test_call_in_a_child_is_an_error_there_alone():
    calls = ("world.barrier()", "world.close()", "world.allocate(8)", "start()")
    output = run_children(dict.fromkeys(calls, 1))
    error = "WorldError: the world cannot be used: this process is a fork"
    for number in range(len(calls)):
        after = output.partition(f"child {number}\n")[2]
        assert error in after.partition("ended with")[0], calls[number]
