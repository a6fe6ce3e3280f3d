"""Answer questions by searching pages: tools that find pages, list their sections and read them.

    search_pages(query) ─► page ids    view_sections(page_id) ─► section ids    read_section(section_id) ─► text
    reward = the right answer is in the last message, or a judge says so      metrics: calls of each tool

Pages and questions are shipped (default) or come from the hub. Pages are found by BM25 over titles and texts, or by
embeddings of an OpenAI-compatible endpoint.
"""

import json
import os
import random
import re
from functools import cached_property
from importlib.resources import files
from typing import Any

import numpy as np

import hone.environments as vf

SYSTEM_PROMPT = "Use the provided Wikipedia search tools to help answer questions."
FOUND = 10  # pages that a search gives


def load_environment(
    max_turns: int = 10,
    pages: str = "shipped",
    corpus_dataset: str = "willcb/rare-wiki-pages",
    corpus_split: str = "train",
    questions_dataset: str = "willcb/wiki-trivia-questions-v4",
    judge_model: str | None = None,
    judge_base_url: str = "https://api.openai.com/v1",
    judge_api_key_var: str = "OPENAI_API_KEY",
    embed_model: str | None = None,
    embed_base_url: str = "https://api.openai.com/v1",
    embed_api_key_var: str = "OPENAI_API_KEY",
    system_prompt: str = SYSTEM_PROMPT,
    num_eval_examples: int = 12,
    seed: int = 0,
) -> vf.Environment:
    """The environment.

    pages: "shipped" (24 pages and 48 questions), or "hub" (`corpus_dataset` and `questions_dataset`).
    judge_model: a model that judges answers, at `judge_base_url`; unless given they are compared as text.
    embed_model: finds pages by embeddings of their titles, from `embed_base_url`; by BM25 unless given.
    """
    if pages not in ("shipped", "hub"):
        raise ValueError(f"wiki-search: pages must be 'shipped' or 'hub', found {pages!r}")
    if pages == "shipped":
        corpus = Pages(shipped_pages())
        rows = [json.loads(line) for line in _file("questions.jsonl").splitlines()]
        random.Random(seed).shuffle(rows)
        train, held_out = rows[num_eval_examples:], rows[:num_eval_examples]
    else:
        corpus, train, held_out = (
            Pages(hub_pages(corpus_dataset, corpus_split)),
            hub_questions(questions_dataset),
            None,
        )
    if embed_model is not None:
        corpus.embed = Embeddings(embed_model, embed_base_url, embed_api_key_var)

    def says_the_answer(completion: vf.Messages, answer: str) -> float:
        """Whether the last message has the right answer in it, word by word."""
        said = completion[-1].get("content") or "" if completion else ""
        return float(f" {plain(answer)} " in f" {plain(said)} ")

    if judge_model is None:
        rubric = vf.Rubric(funcs=[says_the_answer])
    else:
        rubric = vf.JudgeRubric(
            judge_model=judge_model, base_url=judge_base_url, api_key_var=judge_api_key_var
        )
        rubric.add_reward_func(judge_says_yes)
        rubric.add_metric(says_the_answer)
    return WikiSearch(
        dataset=train,
        eval_dataset=held_out,
        system_prompt=system_prompt,
        rubric=rubric,
        max_turns=max_turns,
        tools=[corpus.search_pages, corpus.view_sections, corpus.read_section],
        corpus=corpus,
    )


async def judge_says_yes(
    judge: Any, prompt: vf.Messages, completion: vf.Messages, answer: str, state: vf.State
) -> float:
    return float("yes" in (await judge(prompt, completion, answer, state)).lower())


class WikiSearch(vf.ToolEnv):
    def __init__(self, corpus: "Pages", **others: Any) -> None:
        super().__init__(**others)
        self.corpus = corpus

    def demonstrate(
        self, messages: vf.Messages, example: vf.Example, rng: random.Random
    ) -> vf.Message | str | None:
        """Searches by the words of the question, reads the section that has the answer, and says it."""
        question = example.prompt[-1]["content"]
        calls = sum(message["role"] == "tool" for message in messages)
        place = self.corpus.section_with(example.answer, question)
        if place is None:
            return None
        if calls == 3:
            return example.answer
        page = place.partition(":")[0]
        name, arguments = (
            ("search_pages", {"query": question}),
            ("view_sections", {"page_id": page}),
            ("read_section", {"section_id": place}),
        )[calls]
        call = {"function": {"name": name, "arguments": json.dumps(arguments)}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class Pages:
    """Pages by id; a section of one is what stands between two headings."""

    def __init__(self, pages: list[tuple[str, str, str]]) -> None:
        self.titles = {page_id: title for page_id, title, _ in pages}
        self.texts = {page_id: text for page_id, _, text in pages}
        self.embed: Embeddings | None = None

    @cached_property
    def index(self) -> Any:
        import bm25s

        index = bm25s.BM25()
        index.index(bm25s.tokenize(self.documents, show_progress=False), show_progress=False)
        return index

    @property
    def documents(self) -> list[str]:
        return [f"{title}\n{self.texts[page_id]}" for page_id, title in self.titles.items()]

    async def search_pages(self, query: str) -> list[dict[str, str]]:
        """Search for the pages that fit a query best.

        Args:
            query: The words to search for.
        """
        ids = list(self.titles)
        if self.embed is not None:
            order = (await self.embed.scores(list(self.titles.values()), query)).argsort()[::-1][
                :FOUND
            ]
        else:
            import bm25s

            words = bm25s.tokenize([query], show_progress=False)
            found, scores = self.index.retrieve(words, k=min(FOUND, len(ids)), show_progress=False)
            order = found[0][scores[0] > 0]
        return [{"page_id": ids[i], "title": self.titles[ids[i]]} for i in order]

    async def view_sections(self, page_id: str) -> list[dict[str, str]]:
        """View the sections of a page.

        Args:
            page_id: The id of the page.
        """
        names = [name for name, _ in self.sections(page_id)]
        return [{"section_id": f"{page_id}:{_id(name)}", "section_name": name} for name in names]

    async def read_section(self, section_id: str) -> str:
        """Read a section of a page.

        Args:
            section_id: The id of the section, as view_sections gives it.
        """
        page_id, _, wanted = section_id.partition(":")
        for name, text in self.sections(page_id):
            if _id(name) == wanted:
                return text
        raise ValueError(f"there is no section {section_id!r}; view_sections lists those of a page")

    def sections(self, page_id: str) -> list[tuple[str, str]]:
        if page_id not in self.texts:
            raise ValueError(f"there is no page {page_id!r}; search_pages finds pages")
        parts = re.split(r"^#+ *(.+)$", self.texts[page_id], flags=re.MULTILINE)
        found = [
            (name.strip(), text.strip())
            for name, text in zip(parts[1::2], parts[2::2], strict=True)
        ]
        return found or [("Full", self.texts[page_id])]

    def section_with(self, answer: str, question: str) -> str | None:
        """The id of a section that has the answer, and most words of the question."""
        words = set(plain(question).split())
        found = [
            (
                len(words & set(plain(f"{self.titles[page]} {name} {text}").split())),
                f"{page}:{_id(name)}",
            )
            for page in self.texts
            for name, text in self.sections(page)
            if f" {plain(answer)} " in f" {plain(self.titles[page] + ' ' + text)} "
        ]
        return max(found)[1] if found else None


class Embeddings:
    """Texts as vectors of an OpenAI-compatible endpoint; those of the pages are asked for once."""

    def __init__(self, model: str, base_url: str, api_key_var: str) -> None:
        self.model, self.url, self.key = (
            model,
            f"{base_url.rstrip('/')}/embeddings",
            os.environ.get(api_key_var, ""),
        )
        self._known: np.ndarray | None = None

    async def scores(self, texts: list[str], query: str) -> np.ndarray:
        if self._known is None:
            parts = [await self._ask(texts[i : i + 100]) for i in range(0, len(texts), 100)]
            self._known = np.concatenate(parts)
        return self._known @ (await self._ask([query]))[0]

    async def _ask(self, texts: list[str]) -> np.ndarray:
        import httpx

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        async with httpx.AsyncClient(timeout=60.0, headers=headers) as client:
            answer = await client.post(self.url, json={"model": self.model, "input": texts})
        if answer.status_code != 200:
            raise RuntimeError(
                f"embeddings at {self.url} answered {answer.status_code}: {answer.text[:200]}"
            )
        vectors = np.array([one["embedding"] for one in answer.json()["data"]])
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def plain(text: str) -> str:
    """Words in lower case, without signs between them."""
    return " ".join(re.findall(r"\w+", text.lower().replace(",", "")))


def _id(name: str) -> str:
    return name.strip().lower().replace(" ", "_")


def _file(name: str) -> str:
    return files("wiki_search").joinpath(name).read_text()


def shipped_pages() -> list[tuple[str, str, str]]:
    parts = re.split(r"^# (.+)$", _file("pages.md"), flags=re.MULTILINE)
    return [
        (_id(title), title, text.strip())
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


def hub_pages(name: str, split: str) -> list[tuple[str, str, str]]:
    return [(row["id"], row["title"], row["content"]) for row in _from_hub(name, split)]


def hub_questions(name: str) -> list[dict[str, Any]]:
    return [dict(row) for row in _from_hub(name, "train")]


def _from_hub(name: str, split: str) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(name, split=split)
    except (
        Exception
    ) as error:  # the library raises a dozen kinds for "not reachable" and "not there"
        raise ValueError(
            f"wiki-search: the data set {name} cannot be loaded from the hub ({type(error).__name__}: {error}); "
            'offline, choose pages = "shipped"'
        ) from None
