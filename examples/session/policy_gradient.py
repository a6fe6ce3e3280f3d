"""An RL algorithm of your own against `hone.TrainingSession`: a policy gradient with a group's mean as baseline.

    python examples/session/policy_gradient.py MODEL [--steps n] [--lr x] [--lora] [--random-init]

The task is to answer sums; a number that is wrong is worth more than words. MODEL is a directory or a hub id.
"""

import argparse
import random

import hone


def make_problem(draw):
    """Return a conversation that asks for a sum, and the answer."""
    a, b = draw.randint(1, 20), draw.randint(1, 20)
    system = {"role": "system", "content": "You are a calculator. Answer with the number only."}
    return [system, {"role": "user", "content": f"{a} + {b}"}], str(a + b)


def score_answer(text, answer):
    """Return 1 for the right number, else a fifth of the share of digits."""
    text = text.strip()
    digits = sum(character.isdigit() for character in text)
    return 1.0 if text == answer else 0.2 * digits / max(1, len(text))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--random-init", action="store_true")
    args = parser.parse_args()
    lora = {"rank": 32} if args.lora else None
    session = hone.TrainingSession(args.model, lora=lora, random_init=args.random_init)
    lr = args.lr or (1e-4 if args.lora else 1e-5)
    adam = hone.AdamParams(lr, max_norm=1.0)
    draw = random.Random(0)
    for step in range(args.steps):
        problems = [make_problem(draw) for _ in range(16)]
        prompts = [session.encode_chat(messages) for messages, _ in problems]
        groups = session.sample(prompts, count=8, max_tokens=8, seed=1000 * step)
        data, rewards = [], []
        for prompt, (_, answer), group in zip(prompts, problems, groups):
            texts = [session.tokenizer.decode(one.ids) for one in group]
            own = [score_answer(text, answer) for text in texts]
            baseline = sum(own) / len(own)
            rewards += own
            for one, reward in zip(group, own):
                advantage = (reward - baseline) / (len(prompts) * len(group))
                data.append(hone.Datum.from_completion(prompt, one.ids, one.logprobs, advantage))
        out = session.forward_backward(data, "ppo")
        metrics = session.optim_step(adam)
        reward = sum(rewards) / len(rewards)
        norm = metrics["optim/grad_norm"]
        print(
            f"Step {step + 1} | Reward: {reward:.4f} | Loss: {out.loss:.4f} | Grad. Norm: {norm:.4f}"
        )
    print(
        "Adapter" if args.lora else "Weights",
        "written to",
        session.export_weights("outputs/session/model"),
    )


if __name__ == "__main__":
    main()
