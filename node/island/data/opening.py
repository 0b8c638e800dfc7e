"""The door to what a run trains on: bytes of text, or tokens; where the run file or this node has them.

Opening tokens reads their manifest and looks at the sizes of files, whatever their number: nodes start
as fast with much data as with little. What a node has in a folder is mapped; all else is fetched when it
is needed, if the run file's path is a URL.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from node.island.data.dataset import Dataset, look_at_text, read_corpus, text_files
from node.island.data.fetching import (
    MOST_MANIFEST_BYTES,
    FetchedFiles,
    Origin,
    PieceCache,
    fetched,
    is_url,
    origin_of,
)
from node.island.data.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    FileEntry,
    Manifest,
    check_pieces,
    check_sizes,
    is_missing,
    manifest_of,
    read_manifest,
)
from node.island.data.places import DataPlaces, check_reach, refusal_without_a_loop
from node.island.data.shard_files import Files
from node.island.data.token_shards import FoundFiles, MappedFiles, TokenShards
from protocol.errors import BadDataError, ConfigError, NoInputError
from protocol.files.durable import as_typed, expanded, make_folder, write_atomically
from protocol.run.models import BYTES_VOCABULARY, DecoderModel
from protocol.run.run_spec import DataSection, RunSpec
from protocol.wire.rounds import Digest


def open_dataset(spec: RunSpec, places: DataPlaces) -> Dataset:
    """What a run trains on. Raises AtollError where it is not there."""
    if spec.data.source == "loop":
        raise refusal_without_a_loop(spec)
    if spec.data.source == "function":
        from node.island.data.functions import FunctionData

        return FunctionData(spec)
    data = data_here(spec.data, places)
    if data.source == "tokens":
        return _open_tokens(spec, places)
    _check_may_be_text(spec, data, places)
    context, batch = spec.model.context, spec.inner.batch
    return read_corpus(data, context=context, batch=batch, folder=places.folder)


def look_at_data(spec: RunSpec, places: DataPlaces) -> None:
    """What `open_dataset` would refuse, as far as that is seen without reading data or fetching any.

    Raises AtollError. Data that a holder is still to name are none of its business.
    """
    if spec.data.source in ("function", "loop") or (spec.data.private and not places.own):
        return
    data = data_here(spec.data, places)
    if data.source == "tokens":
        if data.private:
            _open_tokens(spec, places)
        else:
            _look_at_tokens(spec, token_folders(spec, places))
        return
    _check_may_be_text(spec, data, places)
    look_at_text(data, context=spec.model.context, batch=spec.inner.batch, folder=places.folder)


def look_at_run_data(spec: RunSpec, folder: Path) -> None:
    """What every node would refuse of the data that a run file names, as far as they are here.

    It is for who starts a coordinator, where there may be none of them. Raises AtollError.
    """
    data = spec.data
    if data.private or data.source in ("function", "loop") or any(map(is_url, data.paths)):
        return
    if data.source == "tokens":
        place = folder / expanded(data.paths[0])
        if not (place / MANIFEST_FILE).is_file():
            return
        manifest = read_manifest(place)
        check_is_runs(manifest, spec, str(place))
        _check_fits(manifest, spec)
        if all((place / name).exists() for name in manifest.files):
            _open_tokens(spec, DataPlaces(folder=folder))
        return
    _check_has_bytes(spec)
    if data.source == "text":
        try:
            text_files(data.paths, folder)
        except NoInputError:
            return
    look_at_text(data, context=spec.model.context, batch=spec.inner.batch, folder=folder)


def token_folders(spec: RunSpec, places: DataPlaces) -> list[Path]:
    """Where a run's tokens may lie here. Raises NoInputError where the owner names a folder without any."""
    if places.own and not is_url(places.own):
        own = places.folder / expanded(places.own)
        if not own.is_dir() or not any(own.iterdir()):  # as where a disk is not mounted
            raise NoInputError(
                f"{own} holds no tokens: it is {'empty' if own.is_dir() else 'no folder'}",
                next_step="correct data in node.toml, or leave it out: then peers give the tokens",
            )
    paths = (places.own, *spec.data.paths)
    return [places.folder / expanded(path) for path in paths if path and not is_url(path)]


def _look_at_tokens(spec: RunSpec, folders: Sequence[Path]) -> None:
    """Raises AtollError where tokens that are here are not the run's, or cut off; peers may give the rest."""
    if any((folder / MANIFEST_FILE).exists() for folder in folders):
        manifest = manifest_of_run(spec, folders, (), None)
        _check_fits(manifest, spec)
        _files_here(folders, manifest)


def _check_may_be_text(spec: RunSpec, data: DataSection, places: DataPlaces) -> None:
    """Raises AtollError where the model has no place for bytes, or the owner has not allowed their text."""
    _check_has_bytes(spec)
    if data is spec.data:
        check_reach(data.paths, places)


def _check_has_bytes(spec: RunSpec) -> None:
    vocabulary = vocabulary_of(spec)
    if vocabulary is not None and vocabulary < BYTES_VOCABULARY:
        raise ConfigError(
            f"text is read as {BYTES_VOCABULARY} different bytes, and [model] vocab_size is {vocabulary}",
            next_step=f"set [model] vocab_size = {BYTES_VOCABULARY}, or train on tokens",
        )


def data_here(data: DataSection, places: DataPlaces) -> DataSection:
    """The run file's [data] with what the owner names. Raises ConfigError where that is missing."""
    if data.private and not places.own:
        raise ConfigError(
            "in this run each node trains data of its own, and none is named here",
            next_step="name it: data in node.toml, or 'atoll node start --data PATH'",
        )
    if not places.own:
        return data
    if data.source == "python-stdlib":
        raise ConfigError(
            f"node.toml says data = {places.own!r}, and the run trains on the standard library of Python",
            next_step="remove the key data",
        )
    return data.model_copy(update={"paths": (places.own,)})


def vocabulary_of(spec: RunSpec) -> int | None:
    """Tokens that the run's model has; None where nobody says."""
    if isinstance(spec.model, DecoderModel):
        return spec.model.vocab_size
    config = {} if spec.description is None else spec.description.config
    stated = config.get("vocab_size")
    return stated if isinstance(stated, int) else None


def _open_tokens(spec: RunSpec, places: DataPlaces) -> TokenShards:
    """Maps what of a run's tokens is here; reads none of them.

    Raises NoInputError, BadDataError, ConfigError or UnavailableError where they are not the run's.
    """
    paths = [path for path in (places.own, *spec.data.paths) if path]
    folders = [places.folder / expanded(path) for path in paths if not is_url(path)]
    origins = [origin_of(path) for path in paths if is_url(path)]
    if origins and places.cache is None:
        raise ConfigError(
            f"{origins[0].name} is to be fetched, and there is no folder for what is fetched",
            next_step="copy the data, and name its folder",
        )
    manifest = manifest_of_run(spec, folders, origins, places.cache)
    _check_fits(manifest, spec)
    far = None
    if places.cache is not None and (origins or places.has_supply):
        cache = PieceCache(
            places.cache, limit_bytes=places.cache_bytes, leave_bytes=places.leave_bytes
        )
        far = FetchedFiles(origins, manifest.files, manifest.piece_bytes, cache)
    here = _files_here(folders, manifest, far)
    missing = [name for name in manifest.files if name not in here]
    if missing and far is None:
        raise is_missing(folders[0] / missing[0])
    shards = TokenShards(
        manifest,
        FoundFiles(here, far),
        context=spec.model.context,
        has_documents=not spec.data.across_documents,
        digest=None if spec.data.digest is None else Digest(bytes.fromhex(spec.data.digest)),
    )
    _check_enough(shards, context=spec.model.context, batch=spec.inner.batch)
    return shards


def manifest_of_run(
    spec: RunSpec, folders: Sequence[Path], origins: Sequence[Origin], cache: Path | None
) -> Manifest:
    """The run's manifest, from the first place that has one: a folder, what was fetched before, a URL."""
    there = [folder for folder in folders if (folder / MANIFEST_FILE).exists()]
    if not there and (kept := kept_manifest(spec, cache)) is not None:
        return kept
    if there or not origins:
        place = there[0] if there else folders[0]
        manifest = read_manifest(
            place,
            when_missing=_to_make_tokens(spec, as_typed(place))
            if spec.data.private
            else "copy the run's tokens there, or say where they are with data = in node.toml",
        )
        check_is_runs(manifest, spec, str(place))
        return manifest
    assert cache is not None
    text = fetched(origins[0], MANIFEST_FILE, 0, MOST_MANIFEST_BYTES)
    manifest = manifest_of(text, origin=f"{origins[0].name}/{MANIFEST_FILE}")
    check_is_runs(manifest, spec, origins[0].name)
    keep_manifest(spec, cache, text)
    return manifest


def kept_manifest(spec: RunSpec, cache: Path | None) -> Manifest | None:
    """The run's manifest as it was fetched before; None where it was not."""
    if cache is None or spec.data.private:
        return None
    kept = cache / f"{spec.data.digest}.manifest"
    if not kept.exists():
        return None
    manifest = manifest_of(kept.read_bytes(), origin=str(kept))
    return manifest if manifest.digest().hex() == spec.data.digest else None


def keep_manifest(spec: RunSpec, cache: Path, text: bytes) -> None:
    """Keeps a manifest that was fetched and is the run's; of private data each node has its own."""
    if spec.data.private:
        return
    make_folder(cache)
    write_atomically(cache / f"{spec.data.digest}.manifest", text)


def _files_here(
    folders: Sequence[Path], manifest: Manifest, far: FetchedFiles | None = None
) -> Mapping[str, Files]:
    """Files that folders have, each from the first that has it; `far` gives what is damaged of them."""
    here: dict[str, Files] = {}
    for folder in folders:
        own: dict[str, FileEntry] = {
            name: entry
            for name, entry in manifest.files.items()
            if name not in here and (folder / name).exists()
        }
        check_sizes(folder, own)
        if TOKENIZER_FILE in own and manifest.tokenizer == TOKENIZER_FILE:
            _check_tokenizer(folder, manifest)
        mapped = MappedFiles(folder, own, manifest.piece_bytes, far)
        here |= dict.fromkeys(own, mapped)
    return here


def check_is_runs(manifest: Manifest, spec: RunSpec, place: str) -> None:
    """Raises BadDataError for other tokens than the run's."""
    if spec.data.private:
        _check_same_tokenizer(manifest, spec, place)
        return
    digest = manifest.digest().hex()
    if digest != spec.data.digest:
        raise BadDataError(
            f"{place} holds other tokens than the run's: their digest is {digest[:12]}…, and "
            f"[data] digest says {str(spec.data.digest)[:12]}…",
            next_step="name the folder of the run's tokens; or leave --data and data of node.toml out, and "
            "other members give them",
        )


def _check_same_tokenizer(manifest: Manifest, spec: RunSpec, place: str) -> None:
    """Raises BadDataError for private tokens that mean other text than those of the other holders."""
    if manifest.tokenizer_digest != spec.data.tokenizer:
        made_by = {"bytes": "are bytes"}.get(
            manifest.tokenizer, f"are of tokenizer {str(manifest.tokenizer_digest)[:12]}…"
        )
        wanted = spec.data.tokenizer
        raise BadDataError(
            f"the tokens in {place} {made_by}, and the run's "
            + ("are bytes" if wanted is None else f"are of {wanted[:12]}…, by [data] tokenizer"),
            next_step=_to_make_tokens(spec, "…"),
        )


def _to_make_tokens(spec: RunSpec, text: str) -> str:
    """How a holder of private data makes tokens of them."""
    if spec.data.tokenizer is None:
        return (
            f"make them of bytes: atoll data prepare {text} --out NEWDIR; then name NEWDIR as data"
        )
    return (
        "ask the run owner for the tokenizer, and make them with it: atoll data prepare "
        f"{text} --tokenizer FILE --out NEWDIR; then name NEWDIR as data"
    )


def _check_fits(manifest: Manifest, spec: RunSpec) -> None:
    """Raises ConfigError where the run's model cannot take the tokens."""
    vocabulary = vocabulary_of(spec)
    if vocabulary is not None and manifest.vocab_size > vocabulary:
        raise ConfigError(
            f"the tokens have a vocabulary of {manifest.vocab_size}, and [model] vocab_size is {vocabulary}",
            next_step=f"set [model] vocab_size = {manifest.vocab_size} or more",
        )
    context = spec.model.context
    if manifest.row is not None and manifest.row != context + 1:
        raise ConfigError(
            f"the tokens are packed for a context of {manifest.row - 1}, and [model] context is {context}",
            next_step=f"set [model] context = {manifest.row - 1}, or prepare the tokens with "
            f"--pack {context}",
        )


def _check_tokenizer(place: Path, manifest: Manifest) -> None:
    """Raises BadDataError where the tokenizer beside the tokens is not theirs."""
    try:
        check_pieces(place / TOKENIZER_FILE, manifest.files[TOKENIZER_FILE], manifest.piece_bytes)
    except BadDataError as error:
        raise BadDataError(
            f"{place / TOKENIZER_FILE} is not the tokenizer that made these tokens",
            next_step="copy that file again from where the tokens were made",
        ) from error


def _check_enough(shards: Dataset, *, context: int, batch: int) -> None:
    """Raises NoInputError for less than a batch."""
    if shards.num_samples < batch or shards.num_held_out_samples < 1:
        raise NoInputError(
            f"the tokens make {shards.num_samples:,} samples of {context + 1} to train on and "
            f"{shards.num_held_out_samples:,} held out, but one batch takes {batch} and evaluation "
            "at least 1",
            next_step="prepare more text, hold out more of it, or lower [model] context or [inner] batch",
        )
