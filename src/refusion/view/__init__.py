"""Looking at how an answer was written: `refusion view TRACE`.

trace      the file of `refusion generate --trace`: its format, written and read
frames     a fold over its events: one picture a step, as plain data
replay     the pictures on a terminal, drawn by `refusion.live`
html       the pictures as one self-contained page (page.html, page.css, page.js)
gif        the pictures as an animation (needs Pillow)

Contract: this package knows events and texts of tokens. It knows no model, no tokenizer and no method.
"""
