"""Texts in many scripts, with features on which tokenizers differ: blanks, digits, contractions, code, and look-alikes
of control tokens. Tokenizers are trained on them and compared on texts composed of them."""

from __future__ import annotations

from hypothesis import strategies as st

SAMPLES = [
    "été naïve Straße e\u0301a\u0308\u0323 ﬁ ǅ ŉ the text and the other text",
    "Привет, мир! Ёжик й и\u0306 ΰ ςΣ Ελληνικά ά",
    "السلام عليكم ١٢٣ ـــ لَا שָׁלוֹם עולם",
    "नमस्ते क्षत्रिय १२३ ज़ สวัสดีครับ ๑๒๓ กำ",
    "漢字かな交じり文、全角　ＡＢＣ１２３。 한국어 가각 \u1100\u1161\u11a8",
    "👩‍👩‍👧‍👦👍🏽🇺🇳🏳️‍🌈☺️©️ 𝔘𝔫𝔦 𐍈 𒀀 \U0001f9ff \U0010ffff \U000e0041 \U0002f800",
    "\x00\x01\x07\x1b\x7f\x85\xa0\u200b\u200d\u2028\u2029\ufeff\ufffd\u3000\u1680",
    "1234567890 3.14 1,000,000 12345678901234567890 v2 ½ ² ⅷ ①",
    "it's I'LL we've DON'T You'Re 'S x'd ’s 'ſ they'll",
    "def f(x):\n\tif x:\r\n        return x ** 2  # <b>&amp;</b>\n\n\n\t\t}\r\n",
    "a  b   c    d     e" + " " * 40 + "f\n \n  \n\t \n \u00a0 \u3000",
    "___ --- === ... !!! ??? ://foo/bar//\n/\n https://example.com/a?b=c&d=%20#x",
    "▁▁ a▁b ▁ HTTPServer camelCase XMLHttpRequest ÀÉ İı K",
    "<|im_start|>user\n<|im_end|> <s> </s> <unk> <bos> [INST] <0x41> <|endoftext|> <think> <tool_call> <|eot_id|>",
]
_WORDS = sorted({word for sample in SAMPLES for word in sample.split(" ")})
_LETTERS = sorted(set("".join(SAMPLES)))

texts = st.lists(
    st.sampled_from(_WORDS)
    | st.sampled_from(_LETTERS)
    | st.sampled_from([" ", "  ", "\n", "'s", "/"])
    | st.text(max_size=5),
    max_size=8,
).map("".join)
