"""The picture of the lesson: four lanes, twelve steps, outputs of 12, 3, 6 and 8 tokens, and others waiting."""

import xml.etree.ElementTree as ET

import pytest

from services.scheduler.core.limits import Policy, Settings
from shared.wire.facts import ExecutorLimits
from tools.occupancy import text
from tools.occupancy.page import Panel, colour, page
from tools.occupancy.record import BusyShare, Cell, Kind, Recorder, Rows
from tools.simulator.costs import Costs
from tools.simulator.engine import Model, Simulation
from tools.simulator.workload import Arrival, Numbers

LENGTHS = [12, 3, 6, 8, 5, 4, 7, 3, 9, 2, 6, 4]


class Lesson:
    """Everybody is there from the beginning; prompts are one token, so a request takes as many steps as its output."""

    def arrivals(self):
        numbers = Numbers()
        return iter([Arrival(0, numbers.prompt(1), length) for length in LENGTHS])

    def after(self, ended, now_us, answered):
        return None


def drawn(policy: Policy, max_inflight: int = 1) -> tuple[list[str], Rows, Recorder]:
    settings = Settings(policy=policy, max_inflight=max_inflight, static_batch_size=4, static_wait_ms=0)
    model = Model(settings, 1, ExecutorLimits(256, 4, 4, 64), 64, Costs.line(1000, 0, 0, 0, 0), crowd_first=True)
    recorder = Recorder()
    simulation = Simulation(model, Lesson(), recorder)
    simulation.run()
    rows = recorder.executors["executor-0"]
    return [line.split("|")[1] for line in text.draw(rows) if "|" in line], rows, recorder


def dead(rows: Rows, lane: int, steps: int) -> int:
    return sum(step[lane].kind is Kind.DEAD for step in rows.steps[:steps])


def test_static_leaves_dead_lanes_behind_the_early_ones_and_forms_no_batch_before_step_13():
    lanes, rows, recorder = drawn("static")
    assert lanes == [
        "AaaaaaaaaaaaEeeeexxJj.......",
        "BbbxxxxxxxxxHhhxxxxLlll.....",
        "CcccccxxxxxxGggggggIiiiiiiii",
        "DdddddddxxxxFfffxxxKkkkkk...",
    ]
    assert [dead(rows, lane, 12) for lane in range(4)] == [0, 9, 6, 4]
    newcomers = {cell.request for step in rows.steps[:12] for cell in step} - {-1}
    assert newcomers == {0, 1, 2, 3}
    assert recorder.busy.share == pytest.approx((12 + 3 + 6 + 8 + 5 + 4 + 7 + 3) / (19 * 4))


def test_continuous_fills_each_lane_in_the_step_after_its_sequence_retires():
    lanes, rows, recorder = drawn("continuous")
    assert lanes == [
        "AaaaaaaaaaaaKkkkkk.",
        "BbbEeeeeGgggggg....",
        "CcccccFfffIiiiiiiii",
        "DdddddddHhhJjLlll..",
    ]
    assert recorder.busy.share == 1.0
    assert not any(dead(rows, lane, 100) for lane in range(4))


def test_prefill_first_stalls_decodes_for_every_newcomer():
    lanes, _, recorder = drawn("prefill-first")
    assert lanes == [
        "Aaa-aaa-a-a-a-a-a-aLlll..",
        "BbbEeee-eGg-g-g-g-g-g....",
        "Ccc-cccFf-f-fIi-i-i-iiiii",
        "Ddd-ddd-d-dHh-hJjKk-kkkk.",
    ]
    assert 0.63 < recorder.busy.share < 1.0


def test_a_second_step_in_flight_costs_a_lane_one_step_at_each_end():
    lanes, _, _ = drawn("continuous", max_inflight=2)
    assert lanes == [
        "Aaaaaaaaaaaa-Jj-Llll-",
        "Bbb-Eeeee-Hhh-Kkkkkk-",
        "Cccccc-Ffff-Iiiiiiiii",
        "Dddddddd-Ggggggg-....",
    ]


def test_lanes_behind_the_last_one_in_use_are_one_line():
    used, idle = Cell(Kind.DECODE, 0), Cell(Kind.IDLE, -1)
    rows = Rows("e", 12, [[idle, used, *[idle] * 10], [idle] * 12])
    assert list(text.draw(rows)) == ["lane 0 |..|", "lane 1 |a.|", "and 10 lanes more, without a request"]
    assert "<p>and 10 lanes more, without a request</p>" in page("p", [Panel("e", "", [rows])])


def test_all_pictures_of_a_page_have_the_same_scale():
    used = Cell(Kind.DECODE, 0)
    long, short = Rows("a", 1, [[used]] * 800), Rows("b", 1, [[used]] * 400)
    html = page("p", [Panel("a", "", [long]), Panel("b", "", [short])])
    widths = [
        float(part.split('"')[1]) + 0.5 for part in html.split("<rect ")[1:] for part in [part.split("width=")[1]]
    ]
    assert widths[-2:] == [1600, 800]


def test_the_page_is_whole_by_itself_and_shows_every_lane_step():
    _, rows, _ = drawn("static")
    html = page("a <title>", [Panel("static", "note & figures", [rows])], (["policy"], [["static"]]))
    assert "<script" not in html
    assert "http" not in html
    assert "a &lt;title&gt;" in html
    svg = next(part for part in html.split("<svg ")[1:] if "aria-label" in part)
    root = ET.fromstring("<svg " + svg.split("</svg>")[0] + "</svg>")
    widths = [float(rect.attrib["width"]) + 0.5 for rect in root.iter("rect")]
    assert sum(widths) == pytest.approx(len(rows.steps) * 4 * 27, abs=1)
    fills = {rect.attrib["class"] for rect in root.iter("rect")}
    assert fills == {"prefill", "decode", "dead", "idle"}


def test_neighbours_differ_in_colour():
    colours = [colour(request) for request in range(40)]
    assert len(set(colours)) == 40


def test_long_pictures_are_cut_and_say_so():
    rows = Rows("e", 1, [[Cell(Kind.DECODE, 0)]] * 10, dropped=5)
    assert list(text.draw(rows, most_steps=4)) == ["lane 0 |aaaa|", "and 11 steps more"]


def test_letters_come_again_and_none_is_that_of_a_dead_lane():
    letters = [text.letter(request) for request in range(25)]
    assert len(set(letters)) == 25
    assert "x" not in letters
    assert text.letter(25) == "a"
    assert text.letter(-1) == "?"


def test_without_a_queue_there_is_no_share():
    assert BusyShare().share is None
