// What JupyterLab loads for Headroom, as a module container written by hand: there is nothing to build.
// Its own notebooks run when they are opened; links to notebooks open them in JupyterLab; and a button whose class is
// headroom-runs-all has the notebook run again after the kernel has heard of the click.
(() => {
  const OURS = /^(?:.*\/)?(?:start|[0-9]-[a-z]+)\.ipynb$/;
  const started = new WeakSet();
  const style = document.createElement('style');
  const arrow = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'><path fill='white' d='M5 6l4 4 4-4 1 1-5 5-5-5z'/></svg>";
  style.textContent = `
    .jp-Placeholder-content, .jp-PlaceholderText {min-width: 0; overflow: hidden; text-overflow: ellipsis}
    .jp-CodeCell .cm-content {white-space: break-spaces; overflow-wrap: anywhere; flex-shrink: 1}
    [data-jp-theme-light="false"] {--jp-widgets-dropdown-arrow: url("data:image/svg+xml,${encodeURIComponent(arrow)}")}`;
  document.head.append(style); // a folded cell's first line stays within it, a long line goes on in the next; dropdown arrows are seen in the dark

  async function run(app, panel) {
    if (!panel || !panel.context || !OURS.test(panel.context.path) || started.has(panel)) return;
    started.add(panel);
    await Promise.all([panel.context.ready, panel.sessionContext.ready]);
    const cells = panel.content.widgets.filter(cell => cell.model.type === 'code');
    if (!cells.length || cells.some(cell => cell.model.executionCount)) return; // it runs in its kernel already
    const kernel = panel.sessionContext.session.kernel;
    const {content} = await kernel.requestCommInfo({target_name: 'jupyter.widget'});
    // The page has been loaded anew: JupyterLab fetches that kernel's old widgets, and would lose those of a new run.
    if (Object.keys(content.comms || {}).length) await kernel.restart();
    await app.commands.execute('notebook:run-all-cells');
    panel.content.activeCellIndex = 0;
  }

  const plugin = {
    id: 'headroom:plugin',
    autoStart: true,
    activate: app => {
      app.restored.then(() => {
        run(app, app.shell.currentWidget);
        app.shell.currentChanged.connect((_, changed) => run(app, changed.newValue));
      });
      document.addEventListener('click', event => {
        const panel = app.shell.currentWidget;
        const link = event.target.closest && event.target.closest('.headroom a[href$=".ipynb"]');
        if (link && panel && panel.context) {
          event.preventDefault();
          const folder = panel.context.path.split('/').slice(0, -1);
          app.commands.execute('docmanager:open', {path: [...folder, link.getAttribute('href')].join('/')});
        } else if (event.target.closest && event.target.closest('.headroom-runs-all')) {
          app.commands.execute('notebook:run-all-cells');
        }
      });
    }
  };

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB.headroom = {init: () => {}, get: async () => () => ({__esModule: true, default: plugin})};
})();
