"""Environment of verifiers' v1 API: letters shown as colored images, over three turns."""

import base64
import itertools
import random
import struct
import zlib

import verifiers.v1 as vf

__all__ = ["ColorEnv", "ColorTaskset"]
COLORS = {"A": (255, 0, 0), "B": (0, 255, 0), "C": (0, 0, 255), "D": (255, 255, 0)}
TURNS = 3


def encode_png(color):
    """Return a data URL of an image of 2 x 2 pixels."""

    def chunk(kind, data):
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    rows = (b"\0" + bytes(color) * 2) * 2
    head = struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


def build_message(letters):
    images = [
        vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url=encode_png(COLORS[letter])))
        for letter in letters
    ]
    text = vf.TextContentPart(text=f"{len(letters)} squares. Write the whole word so far.")
    return vf.UserMessage(content=[*images, text])


class ColorData(vf.TaskData):
    answer: str


class ColorTask(vf.Task[ColorData]):
    @vf.reward
    async def exact_match(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class ColorEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as conversation:
            await conversation.turn()
            for i in range(1, TURNS):
                letters = task.data.answer[2 * i : 2 * i + 2]
                await conversation.turn([build_message(letters)])


class ColorTaskset(vf.Taskset[ColorTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        draw = random.Random(0)
        for i in itertools.count():
            answer = "".join(draw.choices(list(COLORS), k=2 * TURNS))
            prompt = [build_message(answer[:2])]
            yield ColorTask(ColorData(idx=i, prompt=prompt, answer=answer), self.config.task)
