"""What the site's build does beside mkdocs (its `hooks`): links to pictures that were not drawn are left out, so a build needs no measurements.

`tilewise report` and `python tools/video.py fill` draw those under docs/plots, of which the repository holds the one on its first page. `make docs`
draws them before it builds; a picture that is there is shown.
"""

import posixpath
import re

PLOT = re.compile(r"(!?)\[([^\]]*)\]\((?P<target>[^)\s]*plots/[^)\s]+\.svg)\)")


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """mkdocs calls this with each page's text."""
    folder = posixpath.dirname(page.file.src_uri)
    return without_missing(
        markdown, lambda target: files.get_file_from_path(posixpath.normpath(posixpath.join(folder, target))) is not None
    )


def without_missing(markdown: str, exists) -> str:
    """The text with its pictures and links to plots, but for those that do not exist: of a link the words stay, of a picture its description."""

    def shown(found: re.Match) -> str:
        if exists(found["target"]):
            return found[0]
        return f"*({found[2]}: not drawn in this build)*" if found[1] else found[2]

    return PLOT.sub(shown, markdown)
