"""The page at /: its files, and what a person does with it, in a real browser where one is installed.

`make page` installs the driver's Python side and says how to get the browser (docs/server.md).
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.server.browser import started
from tests.server.live import TOKENIZER, Live, events_of, toy

from klero.server.static import FILES, FOLDER
from klero.testing.models import ScriptedModel

KEY = "sesame"
LARGEST = 2**64 - 1
LENGTH = "cut at max_tokens"  # what the page says for "length"
LONG = 2  # a seed with which the toy model does not end for 200 tokens
SAID = "<img src=x onerror=\"document.title='hit'\"><b>é € 👍"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def scripted():
    """A server that asks for a key, and whose model says SAID to every prompt as long as PROMPT."""
    model = ScriptedModel([*TOKENIZER.encode(SAID), 256], len(PROMPT), vocab_size=257, end_token_ids=(256,))
    with Live(lambda: toy(model), api_key=KEY) as server:
        yield server


# ---- Without a browser


@pytest.mark.parametrize("path", sorted(FILES))
def test_every_file_is_served_and_may_load_nothing_from_elsewhere(live, path):
    answer = live.get(path)
    assert (answer.status_code, answer.content) == (200, FILES[path].data)
    assert answer.headers["content-type"] == FILES[path].content_type
    rules = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    assert rules.pop("default-src") == rules.pop("frame-ancestors") == "'none'"
    assert set(rules.values()) == {"'self'", "'none'", "'script'"}
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_an_unchanged_file_is_not_sent_again(live):
    tag = live.get("/").headers["etag"]
    again = live.get("/", headers={"if-none-match": f'"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert live.get("/", headers={"if-none-match": '"other"'}).status_code == 200
    assert live.get("/").headers["cache-control"] == "no-cache"


def test_the_page_needs_no_key_and_its_routes_do(scripted):
    assert {scripted.get(path).status_code for path in FILES} == {200}
    assert scripted.get("/v1/models").status_code == 401
    assert scripted.get("/page/").status_code == scripted.get("/page/page.py").status_code == 401  # no folder is open


def test_the_page_is_only_read(live):
    assert live.get("/page/../app.py").status_code == live.get("/page/nothing").status_code == 404
    refused = live.post("/", {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
    assert httpx2.head(live.url + "/").headers["content-length"] == str(len(FILES["/"].data))
    assert not {path for path in live.get("/openapi.json").json()["paths"] if path in FILES}


def test_every_file_of_the_folder_is_served():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(Path(path).name or "index.html" for path in FILES)


@pytest.mark.parametrize("path", sorted(FILES))
def test_the_files_name_no_other_place_and_make_no_html_of_texts(path):
    text = FILES[path].data.decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.findall(r"https?:|//[a-z]|@import|url\(", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|style=", text)


def test_what_the_page_loads_is_there():
    text = FILES["/"].data.decode()
    named = re.findall(r'(?:href|src)="([^"]+)"', text)
    for path, file in FILES.items():
        if path.endswith(".js"):
            named += re.findall(r'from "\.(/[^"]+)"', file.data.decode())
    assert {f"/page/{Path(name).name}" for name in named} == set(FILES) - {"/"}


# ---- In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all."""
    with started(tmp_path_factory.mktemp("chromium")) as one:
        yield one


@pytest.fixture
def page(browser, live):
    """The page of the live server, opened anew. Afterwards: no word on the console, and no request elsewhere."""
    browser.open(live.url).until("document.querySelector('#model.ready')", "the model")
    yield browser
    assert browser.look() == []
    assert browser.hosts == {"127.0.0.1"}
    live.all_free()


def test_an_answer_is_shown_token_by_token_and_comes_again(page, live):
    page.run(max_tokens="12", temperature="0.8")
    facts, said = page.facts(), page.said()
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": int(facts["seed"])}
    (expected,) = live.complete(**body, return_token_ids=True)["choices"]
    count = len(expected["token_ids"])
    assert "".join(said) == expected["text"]
    assert (len(said), facts["answer"], facts["prompt"]) == (count, f"{count} tokens", "24 tokens")
    reason = expected["finish_reason"]
    assert (facts["reproducible"], facts["end"]) == ("yes", LENGTH if reason == "length" else reason)
    page.run("#again", max_tokens="1")  # what is typed meanwhile is for the next run
    assert (page.said(), page.facts()["end"]) == (said, "the same text again")
    assert f"{count} tokens, the same text again" in page.find("#status").get_property("textContent")


def test_the_largest_seed_keeps_its_digits(page, live):
    page.run(max_tokens="8", seed=str(LARGEST))
    assert page.facts()["seed"] == str(LARGEST)
    expected = live.complete(prompt=PROMPT, max_tokens=8, seed=LARGEST)["choices"][0]["text"]
    assert "".join(page.said()) == expected != live.complete(prompt=PROMPT, max_tokens=8, seed=0)["choices"][0]["text"]
    page.run("#again")
    assert (page.facts()["end"], page.facts()["seed"]) == ("the same text again", str(LARGEST))
    assert page.look() == []
    assert [json.loads(body)["seed"] for body in page.posted[-2:]] == [LARGEST, LARGEST]


def test_alternatives_and_receipt_are_told_on_hover_and_on_focus(page, live):
    from selenium.webdriver import ActionChains, Keys

    page.run(max_tokens="6", seed="5", top_k="9", alternatives="4")
    choice = live.complete(prompt=PROMPT, max_tokens=6, seed=5, top_k=9, logprobs=4, return_receipts=True)["choices"][0]
    assert not page.find("#details").is_displayed()
    ActionChains(page.driver).move_to_element(page.find(".token:nth-child(3)")).perform()
    told = page.text("#details")
    assert f"token 3 · id {choice['receipts'][2]['token_id']}" in told
    assert page.count("#details tr") == len(choice["logprobs"]["top_logprobs"][2])
    receipt = page.text("#details .receipt").split("\n")
    assert receipt[:4] == ["rank", str(choice["receipts"][2]["rank"]), "num_kept", "9"]
    for name in ("kept_mass", "raw", "processed"):
        shown = f"{choice['receipts'][2][name]:.3f}".replace("-", "−")
        assert receipt[receipt.index(name) + 1].endswith(shown)

    page.driver.execute_script("document.querySelector('.token').focus()")
    assert "token 1 ·" in page.text("#details")
    page.keys(Keys.ARROW_RIGHT)
    assert "token 2 ·" in page.text("#details")
    page.keys(Keys.END)
    assert "token 6 ·" in page.text("#details")
    page.keys(Keys.ARROW_LEFT)
    assert "token 5 ·" in page.text("#details")
    page.keys(Keys.HOME)
    assert "token 1 ·" in page.text("#details")
    focused = page.driver.switch_to.active_element
    percent = 100 * 2.718281828459045 ** choice["logprobs"]["token_logprobs"][0]
    assert float(re.search(r"([\d.]+) %", focused.get_attribute("aria-label"))[1]) == pytest.approx(percent, rel=0.05)


def test_the_shade_is_the_probability(page, live):
    page.run(max_tokens="6", seed="5")
    (choice,) = live.complete(prompt=PROMPT, max_tokens=6, seed=5, logprobs=0)["choices"]
    logprobs = choice["logprobs"]["token_logprobs"]
    shades = page.driver.execute_script(
        "return [...document.querySelectorAll('.token')].map((one) => one.style.getPropertyValue('--shade'))"
    )
    assert [float(one) for one in shades] == pytest.approx([min(1, -x / 6.907755) for x in logprobs], abs=1e-3)


def test_a_conversation_goes_on(page, live):
    page.find("[value=chat]").click()
    page.type(".message textarea", "Hi")
    page.run(max_tokens="5", seed="3")
    said = "".join(page.said())
    hi = {"role": "user", "content": "Hi"}
    body = {"messages": [hi], "max_tokens": 5, "seed": 3}
    first = live.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert said == first["content"]
    page.find("#reply").click()
    page.keys("And?")
    page.chord("\ue007")
    page.until("document.querySelectorAll('.token').length === 5 && !document.querySelector('#run').disabled")
    body["messages"] = [hi, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    assert "".join(page.said()) == live.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    page.find("#reply").click()
    page.run(temperature="-1")
    assert not page.find("#reply").is_displayed()  # else the answer would be in the conversation twice
    assert len(page.look()) == 1


def test_a_fault_is_told_beside_its_field(page):
    page.run(temperature="-1", top_p="much", stop="a\\n\nb", seed=str(LARGEST + 1))
    told = page.text("#error")
    for name in ("temperature", "top_p", "seed"):
        assert f"{name}=" in told
        assert page.find(f"[name={name}]").get_attribute("aria-invalid") == "true"
    assert page.find("[name=stop]").get_attribute("aria-invalid") is None
    assert "400" in page.look().pop()  # which the browser says of its own
    assert json.loads(page.posted[-1])["stop"] == ["a\n", "b"]
    page.run(temperature="1", top_p="", seed="", stop="")
    assert not page.find("#error").is_displayed()
    assert page.count("[aria-invalid]") == 0


def test_a_refused_request_leaves_the_answer_before_it(page):
    page.run(max_tokens="6", seed="5")
    before = page.said(), page.facts()
    page.run(temperature="-1")
    assert "temperature=" in page.text("#error")
    assert (page.said(), page.facts()) == before
    assert page.find("#sent").is_displayed()
    assert page.count(".waiting") == 0
    page.answer({"error": {"message": "waited too long"}})
    page.run()
    assert page.text("#error") == "waited too long"
    assert (page.said(), page.facts()) == before
    assert len(page.look()) == 1  # what the browser says of the 400
    page.open(page.driver.current_url.rstrip("/"))  # there a refused request is the first
    page.run(temperature="-1")
    assert not page.find("#again").is_enabled()
    assert page.find("#empty").is_displayed()
    assert len(page.look()) == 1


def test_run_again_is_of_the_answer_that_is_shown(page):
    page.run(max_tokens="6", seed="5")
    said = page.said()
    page.run(temperature="-1", seed="6")
    page.run("#again")
    assert (page.said(), page.facts()["end"]) == (said, "the same text again")
    assert not page.find("#error").is_displayed()
    assert len(page.look()) == 1


def test_an_answer_that_breaks_off_says_so(page):
    page.answer({"choices": [{"text": "", "seed": 1, "reproducible": True}]}, {"error": {"message": "it ended"}})
    page.run()
    assert (page.text("#error"), page.facts()["end"]) == ("it ended", "broken off")


@pytest.mark.parametrize(
    ("mode", "most", "end"), [("chat", "9", LENGTH), ("chat", "", "the context is full"), ("completion", "", LENGTH)]
)
def test_what_cut_an_answer_off(page, mode, most, end):
    page.answer({"choices": [{"text": "", "seed": 1, "reproducible": True, "finish_reason": "length"}]}, "[DONE]")
    page.find(f"[value={mode}]").click()
    page.run(max_tokens=most)
    assert page.facts()["end"] == end


def test_max_tokens_follows_the_mode_until_it_is_typed(page):
    def most():
        return page.find("[name=max_tokens]").get_property("value")

    found = [most()]
    for mode in ("chat", "completion", None, "chat"):
        page.find(f"[value={mode}]").click() if mode else page.type("[name=max_tokens]", "7")
        found.append(most())
    assert found == ["64", "256", "64", "7", "7"]


def given_to_curl(page, has_clipboard=True, key=""):
    """URL, body and headers that curl gets when a shell runs what the button copies."""
    page.driver.execute_script(
        "Object.defineProperty(navigator, 'clipboard', {value: arguments[0] ? {writeText: async (text) => {"
        " window.copied = text; }} : undefined});"
        "document.addEventListener('copy', () => { window.copied = document.activeElement.value; });", has_clipboard,
    )  # fmt: skip
    page.find("#sent summary").click()
    page.find("#curl").click()
    page.until("document.querySelector('#curl').innerText === 'Copied'")
    command = page.driver.execute_script("return window.copied")
    assert not key or key not in command
    script = "curl() { printf '%s\\0' \"$@\"; }\n" + command
    ran = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True, env={"KLERO_API_KEY": key})
    stream, url, *options, data, body, end = ran.stdout.decode().split("\0")
    assert (stream, data, end, set(options[::2])) == ("-N", "--data-raw", "", {"-H"})
    page.look()
    return url, body, *options[1::2]


@pytest.mark.parametrize("has_clipboard", [True, False], ids=["clipboard", "without"])
def test_the_request_is_copied_as_curl(page, live, has_clipboard):
    page.run(prompt="It's \\ $HOME `id` \"€\"!\n'", max_tokens="6", seed=str(LARGEST))
    url, body, *rest = given_to_curl(page, has_clipboard)
    assert (url, body, rest) == (f"{live.url}/v1/completions", page.posted[-1], ["Content-Type: application/json"])
    assert f'"seed":{LARGEST},' in body
    *events, _, _ = events_of(live.post(urlsplit(url).path, body.encode()).text)
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(page.said())


def test_the_header_says_that_the_server_is_gone_and_back(browser):
    with Live() as server:
        browser.open(server.url).until("document.querySelector('#model.ready')", "the model")
        header = browser.text("#model")
        browser.run(max_tokens="3")
        said = browser.said()
    browser.run(seed="1")
    assert browser.text("#error") == "The server could not be reached."
    assert browser.said() == said
    browser.until("document.querySelector('#model.gone')", "the header")
    assert browser.text("#model") == "The server cannot be reached; looking again"
    with Live(port=int(server.url.rpartition(":")[2])):
        browser.until("document.querySelector('#model.ready')", "the model")
        assert browser.text("#model") == header
        browser.run()
        assert not browser.find("#error").is_displayed()
        browser.driver.get("about:blank")
    assert all("ERR_CONNECTION" in message for message in browser.look())


def test_an_answer_is_stopped(page, live):
    assert live.complete(prompt=PROMPT, max_tokens=200, seed=LONG)["choices"][0]["finish_reason"] == "length"
    page.driver.execute_script(  # pressed as soon as there is a token
        "new MutationObserver(() => document.querySelector('#halt').click())"
        ".observe(document.querySelector('#tokens'), {childList: true})"
    )
    page.run(max_tokens="200", seed=str(LONG))
    assert page.facts()["end"] == "stopped by you"
    assert 0 < len(page.said()) < 200
    assert page.find("#again").is_enabled()


def test_a_key_is_asked_for_and_html_stays_text(browser, scripted):
    from selenium.webdriver import Keys

    browser.open(scripted.url).until("document.activeElement.id === 'key'", "the field of the key")
    assert (browser.text("#model"), browser.text("#key-said")) == ("Waiting for a key", "This server asks for a key.")
    browser.find("#run").click()  # which has to wait
    for wrong in ("wrong", "Schlüssel €"):
        browser.until("document.activeElement.id === 'key'")
        browser.keys(wrong, Keys.ENTER)  # what was there is selected, and so replaced
        browser.until("document.querySelector('#key-said').innerText === 'This key was not accepted.'")
        assert browser.find("#key").get_property("value") == wrong
    browser.keys(KEY, Keys.ENTER)
    browser.until("document.querySelector('#model.ready')", "the model")
    assert not browser.find("#key-form").is_displayed()
    browser.until("document.querySelector('#facts dd') && !document.querySelector('#run').disabled", "what waited")
    url, _, *headers = given_to_curl(browser, key=KEY)
    assert (url, headers[1]) == (f"{scripted.url}/v1/completions", f"Authorization: Bearer {KEY}")
    said = SAID.encode()
    for mode in ("completion", "chat"):
        browser.find(f"[value={mode}]").click()
        if mode == "chat":
            browser.type(".message textarea", PROMPT[: -len("[user][assistant]")])
        browser.run(max_tokens="99")
        shown = browser.said()
        assert "".join(shown) == SAID
        assert len(shown) == len(said) + 1  # each byte is a token, and the end is one that has no text
        assert shown[said.index("€".encode()) :][:3] == ["", "", "€"]
        assert (browser.count(".token.piece"), browser.count(".token.hidden")) == (1 + 2 + 3, 1)
    assert browser.count("#tokens img, #tokens b") == 0
    assert browser.driver.title == "klero"
    assert all("401" in message for message in browser.look())
    assert browser.hosts == {"127.0.0.1"}
    assert KEY not in browser.driver.current_url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_narrow_screen_and_the_scheme_of_the_system(page, scheme):
    from selenium.webdriver import Keys

    send = page.driver.execute_cdp_cmd
    screen = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    send("Emulation.setDeviceMetricsOverride", screen)
    send("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    try:
        page.run(max_tokens="40", seed="1")
        page.driver.execute_script("document.querySelector('.token').focus()")
        assert page.find("#details").is_displayed()
        top = "return document.activeElement.querySelector('.ink').getBoundingClientRect().top + scrollY"
        tops = [page.driver.execute_script(top)]
        for key in (Keys.ARROW_DOWN, Keys.ARROW_UP):
            page.keys(key)
            tops.append(page.driver.execute_script(top))
        assert tops[0] == tops[2] < tops[1]
        width, *colours = page.driver.execute_script(
            "const root = document.documentElement; const style = getComputedStyle(root);"
            "return [root.scrollWidth, style.backgroundColor, style.color]"
        )
        assert width <= 360
        dim, bright = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert (dim < bright) == (scheme == "dark")
        page.find("#details .close").click()
        assert not page.find("#details").is_displayed()
    finally:
        send("Emulation.clearDeviceMetricsOverride", {})
        send("Emulation.setEmulatedMedia", {"features": []})
