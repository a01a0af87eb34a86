"""What the site's build does beside mkdocs (its `hooks`).

It serves MathJax itself, from a package of the extra `docs`, and draws the picture that programs show of a link (social_picture.py).
Links to pictures that were not drawn are left out, so a build needs no measurements: `tilewise report` and `python tools/video.py fill` draw those
under docs/plots, of which the repository holds the one on its first page. `make docs` draws them before it builds; a picture that is there is shown.
"""

import importlib.util
import posixpath
import re
import sys
from pathlib import Path

MATHJAX = "javascripts/mathjax"  # where the site has it
SCRIPT, FONTS = "tex-chtml.js", "output/chtml/fonts/woff-v2"
SOCIAL = "social.png"
SHORT = re.compile(r"<code>(?=[^<\n]{1,30}</code>)")  # what fits on a phone's line
PLOT = re.compile(r"(!?)\[([^\]]*)\]\((?P<target>[^)\s]*plots/[^)\s]+\.svg)\)")


def mathjax() -> Path:
    """The folder of MathJax's files. PluginError where the package that has them is not installed."""
    found = importlib.util.find_spec("mathjax")
    if found is None or found.origin is None:
        from mkdocs.exceptions import PluginError

        raise PluginError("MathJax is not installed: pip install -c constraints.txt '.[docs]' (the package django-static-mathjax)")
    return Path(found.origin).parent / "static/mathjax/es5"


def on_files(files, *, config):
    """MathJax with its fonts, and the picture of the site."""
    from mkdocs.structure.files import File  # here, as `without_missing` is tested where mkdocs is not installed

    folder = mathjax()
    for path in (folder / SCRIPT, *sorted((folder / FONTS).iterdir())):
        files.append(File.generated(config, f"{MATHJAX}/{path.relative_to(folder).as_posix()}", abs_src_path=str(path)))
    sys.path.insert(0, str(Path(__file__).parent))
    from social_picture import draw

    files.append(File.generated(config, SOCIAL, content=draw()))
    return files


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """mkdocs calls this with each page's text."""
    folder = posixpath.dirname(page.file.src_uri)
    return without_missing(
        markdown, lambda target: files.get_file_from_path(posixpath.normpath(posixpath.join(folder, target))) is not None
    )


def on_page_content(html: str, *, page, config, files) -> str:
    """mkdocs calls this with each page's HTML."""
    return short_code_whole(html)


def on_post_page(output: str, *, page, config) -> str:
    """MathJax on pages with formulas: a megabyte that the others need not load."""
    if 'class="arithmatex"' not in output:
        return output
    from mkdocs.utils import get_relative_url

    script = f'<script src="{get_relative_url(f"{MATHJAX}/{SCRIPT}", page.url)}" async></script>'
    return output.replace("</body>", f"{script}</body>")


def short_code_whole(html: str) -> str:
    """The page with short code marked: the stylesheet breaks no line in it (after the hyphens of an option, say)."""
    return SHORT.sub('<code class="whole">', html)


def without_missing(markdown: str, exists) -> str:
    """The text with its pictures and links to plots, but for those that do not exist: of a link the words stay, of a picture its description."""

    def shown(found: re.Match) -> str:
        if exists(found["target"]):
            return found[0]
        return f"*({found[2]}: not drawn in this build)*" if found[1] else found[2]

    return PLOT.sub(shown, markdown)
