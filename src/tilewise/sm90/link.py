"""A shared library of one object file: what `cc -shared` does, for machines without a linker.

The DSL writes compiled functions as ELF objects for x86-64: position-independent, in the large code model, where every address is an offset from
the global offset table (System V psABI for AMD64, section 4.4). So all is known here but where the functions of other libraries lie; those are
entries of that table, which the dynamic loader fills in.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

PAGE = 4096
X86_64, RELOCATABLE, SHARED = 62, 1, 3
PROGBITS, SYMTAB, RELA, NOBITS, FINI_ARRAY, UNWIND = 1, 2, 4, 8, 15, 0x70000001  # sections
LEFT_OUT = (FINI_ARRAY, UNWIND)  # kernels stay loaded until the process ends, and no exception passes through them
WRITE, ALLOC, EXECUTE = 1, 2, 4  # a section's flags
READ, READ_EXECUTE, READ_WRITE = 4, 5, 6  # a segment's
LOAD, DYNAMIC, STACK = 1, 2, 0x6474E551
ABSOLUTE, PC64, GOTOFF64, GOT64, GOTPC64 = 1, 24, 25, 27, 29  # relocations in an object,
GLOB_DAT, RELATIVE = 6, 8  # and those left to the dynamic loader
NEEDED, HASH, STRTAB, DYNSYM, DT_RELA, RELASZ, RELAENT, STRSZ, SYMENT, END = 1, 4, 5, 6, 7, 8, 9, 10, 11, 0
EHDR, PHDR, SHDR = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQQQ"), struct.Struct("<IIQQQQIIQQ")
SYM, ADDEND, TAG = struct.Struct("<IBBHQQ"), struct.Struct("<QQq"), struct.Struct("<qQ")


class NotLinkable(ValueError):
    """The object has something that is not linked here; the message names it."""


@dataclass(slots=True, eq=False)
class Section:
    kind: int
    flags: int
    size: int
    align: int
    link: int
    info: int
    data: bytes
    address: int | None = None  # None: not in the library

    @property
    def loaded(self) -> bool:
        return bool(self.flags & ALLOC) and self.kind not in LEFT_OUT


@dataclass(slots=True, eq=False)
class Symbol:
    name: str
    info: int
    section: Section | None  # None: in another library
    value: int
    size: int

    @property
    def address(self) -> int:
        if self.section is None or self.section.address is None:
            raise NotLinkable(f"nothing says where {self.name or 'a section'} is")
        return self.section.address + self.value


@dataclass(slots=True)
class Relocation:
    section: Section  # holds the address to be mended, at `offset`
    offset: int
    symbol: Symbol
    kind: int
    addend: int

    @property
    def place(self) -> int:
        return self.section.address + self.offset


class Image:
    """The library as it grows. It is mapped as it stands in the file, so an address is an offset in it."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.segments: list[tuple[int, ...]] = []

    def add(self, data: bytes, align: int = 8) -> int:
        self.content.extend(bytes(-len(self.content) % align))
        self.content.extend(data)
        return len(self.content) - len(data)

    def write(self, kind: struct.Struct, address: int, rows: Iterable[Sequence]) -> None:
        for at, row in enumerate(rows):
            kind.pack_into(self.content, address + at * kind.size, *row)

    def segment(self, begin: int, flags: int, zeros: int = 0) -> None:
        """From `begin` to here, and `zeros` bytes that are not in the file; what comes next is on another page."""
        size = len(self.content) - begin
        self.segments.append((LOAD, flags, begin, begin, begin, size, size + zeros, PAGE))
        self.add(b"", PAGE)


def shared_library(object_file: bytes, exports: Callable[[str], bool], needed: Sequence[str]) -> bytes:
    """`object_file`, an x86-64 ELF object of the DSL's, as a shared library.

    Args:
        exports: whether a symbol of this name can be looked up in the library.
        needed: the libraries, by SONAME, that have what the object calls.

    Raises:
        NotLinkable: it is no such object, or has sections or relocations that the DSL's objects do not have.
    """
    try:
        sections, symbols, relocations = _read(object_file)
        exported = [symbol for symbol in symbols if symbol.section and exports(symbol.name)]
        if not exported:
            raise NotLinkable("it defines nothing that is to be exported")
        imported = [symbol for symbol in symbols if symbol.section is None and symbol.name not in ("", "_GLOBAL_OFFSET_TABLE_")]
        return _link([section for section in sections if section.loaded], imported, exported, relocations, needed)
    except (struct.error, IndexError, ValueError) as error:
        if isinstance(error, NotLinkable):
            raise
        raise NotLinkable(f"the object is cut short or damaged ({error})") from None


def _read(data: bytes) -> tuple[list[Section], list[Symbol], list[Relocation]]:
    ident, kind, machine, _, _, _, table, _, _, _, _, size, count, _ = EHDR.unpack_from(data)
    if ident[:6] != b"\x7fELF\2\1" or (kind, machine) != (RELOCATABLE, X86_64):
        raise NotLinkable("it is no ELF object for x86-64")
    sections = []
    for at in range(table, table + count * size, size):
        _, kind, flags, _, offset, length, link, info, align, _ = SHDR.unpack_from(data, at)
        content = b"" if kind == NOBITS else data[offset : offset + length]
        if kind != NOBITS and len(content) != length:
            raise NotLinkable("the object is cut short")
        sections.append(Section(kind, flags, length, max(align, 1), link, info, content))
    symbols = [symbol for table in sections if table.kind == SYMTAB for symbol in _symbols(table, sections)]
    relocations = [
        Relocation(sections[table.info], offset, symbols[info >> 32], info & 0xFFFFFFFF, addend)
        for table in sections
        if table.kind == RELA and sections[table.info].loaded
        for offset, info, addend in ADDEND.iter_unpack(table.data)
    ]
    strange = {each.kind for each in sections if each.loaded} - {PROGBITS, NOBITS}
    if strange or {each.kind for each in relocations} - {ABSOLUTE, PC64, GOTOFF64, GOT64, GOTPC64}:
        raise NotLinkable(f"it has sections of the types {sorted(strange)}, and relocations {sorted({each.kind for each in relocations})}")
    return sections, symbols, relocations


def _symbols(table: Section, sections: list[Section]) -> Iterable[Symbol]:
    names = sections[table.link].data
    for name, info, _, index, value, size in SYM.iter_unpack(table.data):
        section = sections[index] if 0 < index < len(sections) else None
        yield Symbol(names[name : names.index(0, name)].decode(), info, section, value, size)


def _link(
    sections: list[Section], imported: list[Symbol], exported: list[Symbol], relocations: list[Relocation], needed: Sequence[str]
) -> bytes:
    entries = list(dict.fromkeys(each.symbol for each in relocations if each.kind == GOT64))  # of the global offset table
    absolute = [each for each in relocations if each.kind == ABSOLUTE]
    visible = [*imported, *exported]
    names, at_name = _strings([*needed, *(symbol.name for symbol in visible)])

    image = Image()
    image.add(bytes(EHDR.size + 5 * PHDR.size))
    dynstr, dynsym = image.add(names), image.add(bytes(SYM.size * (1 + len(visible))))
    chain = image.add(_one_chain(1 + len(visible)))
    rela = image.add(bytes(ADDEND.size * (len(entries) + len(absolute))))
    _place(image, [each for each in sections if not each.flags & (WRITE | EXECUTE)])
    image.segment(0, READ)
    begin = len(image.content)
    _place(image, [each for each in sections if each.flags & EXECUTE])
    image.segment(begin, READ_EXECUTE)
    begin = len(image.content)
    tags = [(NEEDED, at_name[name]) for name in needed]
    tags += [(HASH, chain), (STRTAB, dynstr), (STRSZ, len(names)), (DYNSYM, dynsym), (SYMENT, SYM.size)]
    tags += [(DT_RELA, rela), (RELASZ, ADDEND.size * (len(entries) + len(absolute))), (RELAENT, ADDEND.size), (END, 0)]
    dynamic, got = image.add(b"".join(TAG.pack(*tag) for tag in tags)), image.add(bytes(8 * len(entries)))
    _place(image, [each for each in sections if each.flags & WRITE and each.kind == PROGBITS])
    image.segment(begin, READ_WRITE, _place_zeros(len(image.content), [each for each in sections if each.kind == NOBITS]))

    slots = {symbol: got + 8 * at for at, symbol in enumerate(entries)}
    left = [(slot, *_value_of(symbol, imported)) for symbol, slot in slots.items()]
    left += [(each.place, RELATIVE, each.symbol.address + each.addend) for each in absolute]
    image.write(ADDEND, rela, left)
    rows = [(at_name[each.name], each.info, 0, *((1, each.address) if each.section else (0, 0)), each.size) for each in visible]
    image.write(SYM, dynsym + SYM.size, rows)  # section 1 stands for any: there is no table of sections
    _relocate(image, relocations, got, slots)
    _add_headers(image, dynamic, TAG.size * len(tags))
    return bytes(image.content)


def _strings(texts: Iterable[str]) -> tuple[bytes, dict[str, int]]:
    data, where = bytearray(1), {}
    for text in texts:
        where[text] = len(data)
        data += text.encode() + b"\0"
    return bytes(data), where


def _one_chain(symbols: int) -> bytes:
    """A hash table of one bucket: it is searched from end to end, which takes no time where one name is looked up in twenty."""
    return struct.pack(f"<{3 + symbols}I", 1, symbols, 1, 0, *range(2, symbols), 0)


def _place(image: Image, sections: Iterable[Section]) -> None:
    for section in sections:
        section.address = image.add(section.data, section.align)


def _place_zeros(end: int, sections: Iterable[Section]) -> int:
    """Sections of zeros behind the file's end; how many bytes they take."""
    begin = end
    for section in sections:
        section.address = end + -end % section.align
        end = section.address + section.size
    return end - begin


def _value_of(symbol: Symbol, imported: list[Symbol]) -> tuple[int, int]:
    """(info, addend) of the relocation that fills in the symbol's entry of the table."""
    return (RELATIVE, symbol.address) if symbol.section else ((1 + imported.index(symbol)) << 32 | GLOB_DAT, 0)


def _relocate(image: Image, relocations: Iterable[Relocation], got: int, slots: dict[Symbol, int]) -> None:
    for each in relocations:
        if each.kind == ABSOLUTE:
            if not each.section.flags & WRITE:
                raise NotLinkable("it has an absolute address where the loader cannot write")
            continue
        if each.kind == GOTPC64:
            value = got - each.place
        elif each.kind == GOT64:
            value = slots[each.symbol] - got
        else:
            value = each.symbol.address - (each.place if each.kind == PC64 else got)
        struct.pack_into("<q", image.content, each.place, value + each.addend)


def _add_headers(image: Image, dynamic: int, size: int) -> None:
    segments = [*image.segments, (DYNAMIC, READ_WRITE, *[dynamic] * 3, size, size, 8), (STACK, READ_WRITE, 0, 0, 0, 0, 0, 16)]
    ident = b"\x7fELF\2\1\1".ljust(16, b"\0")
    image.write(EHDR, 0, [(ident, SHARED, X86_64, 1, 0, EHDR.size, 0, 0, EHDR.size, PHDR.size, len(segments), SHDR.size, 0, 0)])
    image.write(PHDR, EHDR.size, segments)
