"""What keeps objects, code and free room as they are while a process looks at them. Each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

CODE = """
import ctypes, types
from pyshim.host.memory.quickening import have_looked_up, stop_adapting

def bytes_of(function):
    code = function.__code__
    return ctypes.string_at(id(code) + 16, types.CodeType.__basicsize__ - 16 + len(code.co_code))

class Point:
    def __init__(self, x):
        self.x = x
    def moved(self, by):
        return Point(self.x + by)

def work(number):
    found = {"sum": 0, "names": []}
    for at in range(number):
        point = Point(at).moved(1.5)
        found["sum"] += point.x
        found["names"].append(f"{at}-{len(found['names'])}")
        first, second = divmod(at, 3)
        if first == second or "a" == str(at)[:1]:
            found[at] = [first, second][at % 2]
    return repr(found)
"""


def printed_by(script: str) -> list[str]:
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{CODE}\n{script}"
    done = subprocess.run([sys.executable, "-ISc", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("calls_before", [0, 3, 100])
def test_code_computes_the_same_and_writes_nothing_to_itself(calls_before: int) -> None:
    """Called never before, too rarely to be rewritten, and so often that it was."""
    assert printed_by(
        f"""
kept = expected = functions = _ = None  # no name is new later: faster forms are made anew for a namespace that grows
for _ in range({calls_before}):
    work(1)
expected = eval("work(50)", {{"work": types.FunctionType(work.__code__.replace(), globals())}})
functions = [work, Point.__init__, Point.moved]
stop_adapting([id(function.__code__) for function in functions if function.__code__.co_code])
kept = [bytes_of(function) for function in functions]
print(all(work(50) == expected for _ in range(200)))
print([bytes_of(function) for function in functions] == kept)
"""
    ) == ["True", "True"]


def test_code_that_was_rewritten_keeps_its_faster_forms() -> None:
    assert printed_by(
        """
import dis
def forms():
    return {one.opname for one in dis.get_instructions(work, adaptive=True)}
for _ in range(100):
    work(20)
before = forms()
stop_adapting([id(work.__code__)])
print(any(name.endswith("_ADAPTIVE") for name in before), any(name.endswith("_ADAPTIVE") for name in forms()))
plain = {one.opname for one in dis.get_instructions(work)}
print(len(forms() - plain) > 5, forms() - plain <= before)
"""
    ) == ["True", "False", "True", "True"]


def test_a_faster_form_that_did_not_always_fit_is_given_up() -> None:
    assert printed_by(
        """
import dis
class Other:
    def __init__(self):
        self.name, self.x = "other", 1
def x_of(point):
    return point.x
def forms():
    return [one.opname for one in dis.get_instructions(x_of, adaptive=True) if one.opname.startswith("LOAD_ATTR")]
for _ in range(100):
    x_of(Point(1))
print(*forms())
x_of(Other())
stop_adapting([id(x_of.__code__)])
print(*forms())
kept = bytes_of(x_of)
print(x_of(Other()), x_of(Point(7)), bytes_of(x_of) == kept)
"""
    ) == ["LOAD_ATTR_INSTANCE_VALUE", "LOAD_ATTR", "1", "7", "True"]


def test_a_class_writes_nothing_to_itself_when_it_is_looked_up_in() -> None:
    assert printed_by(
        """
class Quiet:
    name = 1
def words():
    return ctypes.string_at(id(Quiet) + 16, type.__basicsize__ - 16)
have_looked_up()
before = words()
print(Quiet.name, Quiet().name, words() == before)
"""
    ) == ["1", "1", "True"]


def test_what_is_made_after_the_gaps_were_filled_lies_apart_from_what_was_there() -> None:
    """Half of many objects of all sizes were freed: what comes next would fill their places."""
    apart, anywhere = (
        int(
            printed_by(
                f"""
from pyshim.host.memory.gaps import fill_gaps
made = [bytes(size) for size in range(1, 3000, 7) for _ in range(20)]
del made[::2]
pages = {{id(one) >> 12 for one in made}}
if {fill}:
    fill_gaps()
new = [bytes(size) for size in range(1, 3000, 11) for _ in range(3)]
print(sum(id(one) >> 12 in pages for one in new) * 100 // len(new))
"""
            )[0]
        )
        for fill in (True, False)
    )

    assert apart < 20
    assert anywhere > 60


def test_objects_that_are_for_ever_outlive_their_last_reference() -> None:
    """Also those that the collector does not know of itself; what is made later ends as ever."""
    assert printed_by(
        """
import gc, weakref
from pyshim.host.memory.objects import EVER, everlasting_objects
class Shy:
    @property
    def __class__(self):
        made.append(object())
        return Shy
made, shy, generator, dead = [], Shy(), (number for number in range(3)), weakref.proxy(Shy())
next(generator)
class Noticed:
    def __init__(self, more): self.more = more
    def __del__(self): print("ended", self.more)
old = Noticed(["text " + str(len(CODE_NAME)) for CODE_NAME in ("a", "bc")])
addresses = id(old), id(old.more), id(old.more[0]), id(None), id(work.__code__.co_consts)
with everlasting_objects() as found:
    print(set(addresses) <= set(found.objects), id(work.__code__) in found.code, id(old) in found.code)
    print(id(generator) in found.objects, id(shy) in found.objects, made)
del old
gc.collect()
print(all(sys.getrefcount(one) > EVER // 2 for one in (None, work.__code__, Noticed)))
new = Noticed("new")
del new
"""
    ) == ["True", "True", "False", "False", "True", "[]", "True", "ended", "new"]
