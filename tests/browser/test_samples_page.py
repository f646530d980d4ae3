"""The page with a role's samples, in a real browser, while samples end."""

from __future__ import annotations

from browser.agent import Agent
from browser.chromium import Tab
from browser.samples import sample, tell_a_step
from rolloutfleet.agent.collection.observer import Evaluation
from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.api.samples import SampleStatus

FIRST = "#list article:first-child"
ARTICLES = "document.querySelectorAll('#list article').length"


def first_is(id: str) -> str:
    return f"document.querySelector('{FIRST}')?.dataset.id === '{id}'"


def tile(tab: Tab, name: str) -> str:
    tiles = dict(text.split("\n", 1) for text in tab.texts("#tiles > div"))
    return str(tiles[name])


def test_it_says_what_it_waits_for_until_the_first_sample_ends(tab: Tab, agent: Agent) -> None:
    tab.wait("!document.querySelector('#empty').hidden")
    assert "waits for the first sample of RolloutServer qwen, role actor" in tab.text("#awaited")
    assert "No prompt has been taken yet" in tab.text("#awaited")
    agent.tell(lambda seen: seen.queue(open=1234, finished=0, running=8))
    tab.wait("document.querySelector('#awaited').innerText.includes('1,234 groups are in work, with 8 requests')")
    agent.ended(sample(3))
    tab.wait(f"{ARTICLES} === 1")
    assert tab.run("document.querySelector('#empty').hidden")
    assert tab.text("#whose") == "qwen (actor)"
    assert tab.text("#state") == "live"


def test_evaluations_show_the_newest_first_also_before_anything_is_trained(tab: Tab, agent: Agent) -> None:
    def ended(seen: Observations) -> None:
        for version, reward in ((3, 0.0), (4, 1.0)):
            group = [sample(version, reward=reward), sample(version, 1, reward=0.0)]
            seen.evaluation_ended(Evaluation("<b>math</b>", version, [group], failed=1, reward_key="", seconds=2.0))

    agent.tell(ended)
    tab.wait("document.querySelectorAll('#evaluations tr').length === 3")
    assert not tab.run("document.querySelector('#main').hidden || document.querySelector('#evaluated').hidden")
    lines = [line.split("\t") for line in tab.texts("#evaluations tr")]
    assert [line[:6] for line in lines[1:]] == [
        ["<b>math</b>", "version 4", "0.5", "50 %", "100 %", "2, 1 failed"],
        ["<b>math</b>", "version 3", "0", "0 %", "0 %", "2, 1 failed"],
    ]


def test_samples_show_as_they_end_the_newest_first_and_no_more_than_fit(tab: Tab, agent: Agent) -> None:
    agent.ended(*(sample(group) for group in range(5)))
    tab.wait(f"{ARTICLES} === 5")
    agent.ended(*(sample(group) for group in range(5, 45)))
    tab.wait(first_is("0/44/0"))
    numbers = tab.run("[...document.querySelectorAll('#list article')].map((one) => +one.dataset.number)")
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) == 24
    assert "What is 44 plus 2?" in tab.run(f"document.querySelector('{FIRST} .prompt').textContent")


def test_tokens_are_coloured_by_the_version_that_sampled_them(tab: Tab, agent: Agent) -> None:
    agent.ended(sample(1, versions=(7, 8), tokens=20))
    tab.wait(first_is("0/1/0"))
    old, new = tab.colour(f"{FIRST} [data-version='7']"), tab.colour(f"{FIRST} [data-version='8']")
    assert old != new
    shown = tab.run(
        f"[...document.querySelectorAll('{FIRST} .t')].map((node) => getComputedStyle(node).backgroundColor)"
    )
    assert shown == [old] * 10 + [new] * 10
    assert tab.texts(f"{FIRST} .mark") == ["v7", "v8"]
    assert tab.texts("#legend .t")[:2] == ["version 7", "version 8"]
    # An update, and a sample that comes while the page is open: the same version has the same colour.
    agent.ended(sample(2, versions=(8, 9), tokens=10))
    tab.wait(first_is("0/2/0"))
    assert tab.colour(f"{FIRST} [data-version='8']") == new
    assert tab.colour(f"{FIRST} [data-version='9']") not in (old, new)


def test_tokens_are_coloured_by_log_prob_when_asked_and_masked_ones_are_marked(tab: Tab, agent: Agent) -> None:
    odd = sample(
        1,
        tokens=4,
        rollout_log_probs=[-0.01, -1.0, -9.0, 0.0],
        weight_versions=[{"version": 7, "start": 0, "end": 3}],
        loss_mask=[1, 1, 0, 0],
    )
    agent.ended(odd)
    tab.wait(first_is("0/1/0"))
    by_version = tab.colour(f"{FIRST} .t")
    tab.click("input[value=logprob]")
    shown = tab.run(
        f"[...document.querySelectorAll('{FIRST} .t')].map((node) => getComputedStyle(node).backgroundColor)"
    )
    assert len(set(shown)) == 3
    assert shown[0] == shown[3] == "rgba(0, 0, 0, 0)"
    assert by_version not in shown
    masked = tab.run(f"[...document.querySelectorAll('{FIRST} .t')].map((node) => node.classList.contains('masked'))")
    assert masked == [False, False, True, True]
    titles = tab.run(f"[...document.querySelectorAll('{FIRST} .t')].map((node) => node.title)")
    ids = odd.response_tokens
    assert titles == [
        f"token {ids[0]} at 0, version 7, log-prob -0.01 (99 %)",
        f"token {ids[1]} at 1, version 7, log-prob -1 (36.8 %)",
        f"token {ids[2]} at 2, version 7, log-prob -9 (0 %), masked: not trained",
        f"token {ids[3]} at 3, not sampled by an engine, masked: not trained",
    ]
    assert tab.texts(f"{FIRST} .mark") == ["v7", "not sampled"]
    tab.click("input[value=version]")
    assert tab.colour(f"{FIRST} .t") == by_version


def test_what_samples_say_is_text_and_never_markup(tab: Tab, agent: Agent) -> None:
    evil = "</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>"
    failed = sample(1, response=evil, prompt=evil, engine=evil, error=evil, status=SampleStatus.FAILED)
    agent.ended(failed)
    agent.tell(Observations.group_dropped, [failed], evil)
    tab.wait(first_is("0/1/0"))
    assert evil in tab.text("#drops")
    assert evil in tab.text(FIRST)
    assert tab.run("document.querySelectorAll('img, b').length") == 0
    assert "owned" not in tab.run("document.title")


def test_a_script_that_got_in_all_the_same_would_not_run(tab: Tab, agent: Agent) -> None:
    tab.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.owned = 1'}))")
    assert tab.run("window.owned") is None
    assert any("Content Security Policy" in problem for problem in tab.problems)
    tab.problems.clear()


def test_figures_and_charts_follow_the_run(tab: Tab, agent: Agent) -> None:
    for step in range(1, 4):
        agent.tell(tell_a_step, step)
    tab.wait("document.querySelectorAll('#curve .dot').length === 3")
    assert tab.run("document.querySelectorAll('#curve .dot.trained').length") == 1
    (first, *_) = tab.run("[...document.querySelectorAll('#curve .dot title')].map((one) => one.textContent)")
    assert first.startswith("step 1 from version 2: reward ")
    assert tile(tab, "Reward").endswith("step 3")
    for step in range(4, 6):
        agent.tell(tell_a_step, step)
    tab.wait("document.querySelectorAll('#curve .dot').length === 5")
    assert tile(tab, "Reward").endswith("step 5")
    assert tile(tab, "Prefix cache hits") == "64.3 %"
    assert tile(tab, "Drafts accepted").startswith("66.7 %")
    assert tab.run("document.querySelectorAll('#rewards .column').length") == 2
    (first, *_) = tab.run("[...document.querySelectorAll('#staleness .column title')].map((one) => one.textContent)")
    assert first.startswith("0 versions: ")
    assert tab.texts("#queue > div")[0].split("\n") == ["groups in work", "16"]
    assert "zero_std_1.0" in tab.text("#drops")


def test_a_reward_that_comes_later_is_shown_and_a_part_that_the_reader_closed_stays_closed(
    tab: Tab, agent: Agent
) -> None:
    agent.ended(sample(1))
    tab.wait(first_is("0/1/0"))
    assert tab.text(f"{FIRST} .reward") == "no reward yet"
    tab.click(f"{FIRST} details[open] summary")
    agent.tell(Observations.group_finished, [sample(1, reward=0.25)])
    tab.wait(f"document.querySelector('{FIRST} .reward').innerText === 'reward 0.25'")
    assert tab.run(ARTICLES) == 1
    assert tab.run(f"document.querySelectorAll('{FIRST} details[open]').length") == 0


def test_of_a_long_response_the_middle_is_left_out(tab: Tab, agent: Agent) -> None:
    agent.ended(sample(1, tokens=20_000))
    tab.wait(first_is("0/1/0"))
    assert tab.run(f"document.querySelectorAll('{FIRST} .t').length") == 900
    assert tab.text(f"{FIRST} .gap") == "… 19,100 tokens …"
    assert "20,000 tokens" in tab.text(f"{FIRST} header")


def test_an_agent_that_does_not_answer_is_told_and_a_new_one_begins_anew(tab: Tab, agent: Agent) -> None:
    agent.ended(sample(1), sample(2))
    tab.wait(f"{ARTICLES} === 2")
    agent.stop()
    tab.wait("!document.querySelector('#error').hidden")
    assert tab.text("#error").startswith("The agent does not answer (")
    assert "What you see is from" in tab.text("#error")
    assert tab.text("#state") == "no answer"
    assert tab.run(ARTICLES) == 2
    agent.start()
    agent.ended(sample(9))
    tab.wait(f"{first_is('0/9/0')} && {ARTICLES} === 1")
    assert tab.run("document.querySelector('#error').hidden")
    assert tab.text("#state") == "live"
    tab.problems.clear()  # the browser's own words for the refused connections


def test_a_reader_can_hold_the_page(tab: Tab, agent: Agent) -> None:
    agent.ended(sample(1))
    tab.wait(first_is("0/1/0"))
    tab.click("#pause")
    assert (tab.text("#pause"), tab.text("#state")) == ("Go on", "paused")
    agent.ended(sample(2))
    # That nothing happens shows in time alone: a poll of the page, and some.
    tab.run("new Promise((done) => setTimeout(done, POLL + 500))")
    assert tab.run(first_is("0/1/0"))
    tab.click("#pause")
    tab.wait(first_is("0/2/0"))
    assert tab.text("#state") == "live"


def test_dark_mode_is_dark_and_a_narrow_window_does_not_scroll_sideways(tab: Tab, agent: Agent) -> None:
    agent.tell(tell_a_step, 1)
    tab.wait(f"{ARTICLES} > 3")
    light = tab.colour("body")
    tab.scheme("dark")
    assert tab.colour("body") != light
    for width in (360, 800, 1280):
        tab.size(width, 900)
        assert tab.run("document.documentElement.scrollWidth <= innerWidth"), width
    tab.size(1280, 1000)


def test_the_page_names_its_parts_for_those_who_do_not_see_it(tab: Tab, agent: Agent) -> None:
    agent.tell(tell_a_step, 1)
    tab.wait(f"{ARTICLES} > 3")
    tree = tab.call("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node.get("ignored")}
    roles = {role for role, _ in named}
    assert ("heading", "Samples qwen (actor)") in named
    assert ("button", "Pause") in named
    assert {"radio", "status", "main", "article"} <= roles
    for role in ("radio", "image", "meter", "button"):
        assert all(name for found, name in named if found == role), role
