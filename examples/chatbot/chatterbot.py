"""ChatterBot's corpus: small talk, in Chinese and in English.

Gunther Cox and contributors, BSD licence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/, for open_data

from open_data.fetch import fetch
from open_data.sources import File
from open_data.sources.python_package import PythonPackage
from pairs import Pair

from quorate.data import cache_dir

FOLDERS = {"zh": "chinese", "en": "english"}

# SHA-256 by language and subject.
CHECKSUMS = {
    "zh": {
        "ai": "2bcf4865be21fe3617cc32bb6f7322e3b976fc367600c28c39f9d666713e26fc",
        "botprofile": "7e036208f4df2a873591c40f973a5c421a1676f9d6d36de2fd8bd3b7fed3f734",
        "conversations": "b689bacb7b35467c5340f18b32a363a3affb76747c0e6bba78c17bbd15fafb66",
        "emotion": "b49abd01b2102d187dbb0d83ad989115d641d9b6798fa098adde2e7922ea4dff",
        "food": "3d117953affeb6c62ab10ee2d9b58adabcef7b87e42c75afcb738e80b91ef702",
        "gossip": "5417ed7c694d4202e43be49fb7eb40aba81ec95f90115428adeaab6afe391002",
        "greetings": "3ee79c3f1c35af1022bf46049968ab22435044b3bc9a287d72c1733c05322329",
        "history": "1c54656a5c9054ab783f0f7ff903c0f1bf7d3e2b39f0daaeb0054a41ce24ef99",
        "humor": "c0b0b7a819d87e22d7ce4af11ffd8545692cfa7632bc66658a537db6ec22dc95",
        "literature": "823ce961391461ddfbde987f766082d39cee02349fd6adc1e686b761eec9e9e1",
        "money": "25b942878b8eed6fa3ef6a3cc3400323c5278dc37ee43c1ae31e818af6284574",
        "movies": "c047762ac4df1ce634efd00346c73076b1f66600f1e7fdabd6d96062eb8976df",
        "politics": "c7b2b23eeacf1bbeeff5ce9a767b76e6c7df81068850b03d79a48f4064f5df97",
        "psychology": "4ab365ccfc38b078269a75bbc7beb5a88bacad1340ee2cdb008924d8bcb4317e",
        "science": "5491bac9e5a6deaece06138fc235e9387e26bb73730b32afe43b5f28fb79ba15",
        "sports": "315658785fdefc6e15579d4c82971073a39dabe0ff9bf0b95ed10530dd206803",
        "trivia": "46c1f8bd45d3d3e0c7f7644e7a1d9f8f23d2ecdf7f57bcb0709b355eabd114f2",
    },
    "en": {
        "ai": "620a65787a56641db4a03e1419a7578e813967218cf6721e3ea4ef90844916aa",
        "botprofile": "1a694c5288f3f8f87d027d2f98dae71d02efa88e28853a6e5d27e6dbce907294",
        "coding": "1726a8900a82ee32dad559809564f9ae97df9c52f42a8f1fcde84b1d54b1d260",
        "computers": "a222c5a432efe4289e6c5edf1c3d99fd26c48df99db0ff893d1d5ab569f5b750",
        "conversations": "1cf105b5802f377b2dc145f741f7df85629c9ca27e450538165286a75b5e3416",
        "emotion": "510a018938c1880dd0f67e1ae458e26878c91a570daef5a84fb83713c89f0989",
        "food": "68eab2497721d03044d520b70c27d8a0d8ba8e505b3265fb3a1ff3e1a64c7124",
        "gossip": "d6f1b1613ed70821fc1c427bdd00395f58b77ff57d76fbe4ab8cb2038cf15c9b",
        "greetings": "0dd7eb8dcee8e2a38cd1a137bcfbd7f3eb732cddfa1bd396fac5a24b063a4d55",
        "health": "eb88edc5302d688ca096374c7e3f5b9d7cd821f053a17d80204c4acdc20ea4f5",
        "history": "0ff4beeb6ef9b641dc12e1039a149c6a03eb8f2e183702fad2b0997fcc1d63e3",
        "humor": "d2aa03a63f0e8e054589f642788afbc41b8c76f5d734c50901a9a63b359ea06b",
        "literature": "9361ff1478273d811259ca307a1e6be23a5e08e776a5bc5d9524fb13deb886f1",
        "money": "2911d9766625ff5c2feb3d784f2951b2ebd5e9658547efce7568d0282c49274b",
        "movies": "075ca9d91a527206c635c88bf0353323826a25a6f2057be1bc71888af389f842",
        "politics": "c436d5efedea6f715a8a811423a8edf396097771eb11e43b1f0a43a6aee7c2f0",
        "psychology": "5047c211d35f715af4fbc3398f111135e99d34afcd0905a661c40bdeb1413a58",
        "science": "3c259799bba36c67a1601fc264ec01ab051e9e63950734ce1ef644e022081fe7",
        "sports": "8d1bcc632cad4058e3b8490daa15dcd7c2a51790a7b9140b252600b794590403",
        "tech_support": "8a87cdf32579c8efdd9c5f3ef166ae9fb76dcf271b958f5e2265b9246b430655",
        "trivia": "3a9de77e6d82803d1ea3eba48cf6543c884908f4c4f50501fed69f88112994dc",
    },
}

CONTENT = " ".join(sha256 for files in CHECKSUMS.values() for sha256 in files.values())


def load(language: str, say: Callable[[str], None] = print) -> list[Pair]:
    """Each thing said and what was said to it, by subject.

    Raises:
        DataError: they cannot be fetched.
    """
    folder = FOLDERS[language]
    files = [File(f"{name}.yml", sha256) for name, sha256 in CHECKSUMS[language].items()]
    paths = {file.name: f"chatterbot_corpus/data/{folder}/{file.name}" for file in files}
    cache = cache_dir() / "chatterbot" / folder
    place = fetch(
        f"ChatterBot's corpus ({folder})",
        files,
        (PythonPackage("chatterbot-corpus==1.3.3", paths),),
        cache=cache,
        licence="BSD",
        hint=f"into {cache}",
        say=say,
    )
    pairs = []
    for file in files:
        content = yaml.safe_load((place / file.name).read_text(encoding="utf-8"))
        for said in content["conversations"]:
            pairs += [Pair(str(first), str(second)) for first, second in pairwise(said)]
    return pairs
